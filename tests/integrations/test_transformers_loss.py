"""Labels of transformers in all their forms, in training and evaluation, alone and from its Trainer."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    Trainer,
    TrainingArguments,
)

import hetxl
from hetxl.integrations.transformers_loss import check_one_class

CLASSES = 7
TOKENS = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(3))
SEVERAL = {"problem_type": "multi_label_classification"}


def make(kind=BertForSequenceClassification, **options):
    """Small, without dropout: training and evaluation compute the same."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return kind(config)


@pytest.mark.parametrize(
    ("kind", "options", "shape"),
    [
        (BertForSequenceClassification, {}, (3,)),
        (BertForTokenClassification, {}, (3, 9)),
        (BertForSequenceClassification, SEVERAL, (3,)),
    ],
)
def test_labels_as_rows(kind, options, shape):
    model = hetxl.convert(make(kind, **options), "det")
    labels = torch.rand(*shape, CLASSES)
    labels = labels.round() if options else labels.softmax(-1)
    logits = model.eval()(TOKENS).logits
    if options:
        expected = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(-1).mean()
    else:
        expected = -(labels * logits.log_softmax(-1)).sum(-1).mean()
    count = torch.ones_like(labels).sum().long()  # as Trainer counts labels: all their entries
    for mode in (True, False):
        model.train(mode)
        torch.testing.assert_close(model(TOKENS, labels=labels).loss, expected)
        torch.testing.assert_close(model(TOKENS, labels=labels, num_items_in_batch=count).loss, expected)
        torch.testing.assert_close(model(TOKENS, labels=labels, num_items_in_batch=int(2 * count)).loss, expected / 2)


@pytest.mark.parametrize("training", [True, False])
def test_rows_of_several_labels_need_a_link(training):
    labels = torch.eye(CLASSES)[:3]
    several = labels + labels.roll(1, -1)
    model = hetxl.convert(make()).train(training)
    assert model(TOKENS, labels=labels).loss.isfinite()
    for wrong, found in ((several, "2"), (0 * labels, "0")):
        with pytest.raises(
            ValueError, match=f'sums to {found}, .*problem_type="multi_label_classification", or link="sigmoid"'
        ):
            model(TOKENS, labels=wrong)
    for options, links in (
        ({}, {"link": "softmax"}),
        ({}, {"link": "sigmoid"}),
        (SEVERAL, {}),
        ({"problem_type": "single_label_classification"}, {}),
    ):
        model = hetxl.convert(make(**options), **links).train(training)
        assert model(TOKENS, labels=several).loss.isfinite()


def test_what_one_class_looks_like():
    check_one_class(torch.tensor([0, 6, 2]), CLASSES)
    check_one_class(torch.tensor([[2, 2, 2, 2, 2, 2, 2]]), CLASSES)  # ids of a sequence
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check_one_class(torch.rand(50, CLASSES).softmax(-1).to(dtype), CLASSES)
    with pytest.raises(ValueError, match=r"sums to 0\.95"):
        check_one_class(torch.tensor([[0.5, 0.5], [0.5, 0.45]]), 2)


class Soft(torch.utils.data.Dataset):
    """Tokens with probabilities of the classes, or with several labels."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"input_ids": TOKENS[number % 3], "labels": self.rows[number]}


@pytest.mark.parametrize("options", [{}, SEVERAL])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_the_trainer_with_labels_as_rows(options, tmp_path):
    rows = torch.rand(8, CLASSES, generator=torch.Generator().manual_seed(0))
    data = Soft(rows.round() if options else rows.softmax(-1))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=0.0, report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(hetxl.convert(make(**options), "det"), arguments, train_dataset=data, eval_dataset=data)
    assert trainer.train().training_loss == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
