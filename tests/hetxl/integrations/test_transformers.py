"""Models of transformers: converted, trained a step, saved, loaded and asked; small, with random weights."""

import copy
import inspect
import logging

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    Trainer,
    TrainingArguments,
)

import hetxl
from hetxl.integrations.convert import head_of, mean_logits
from hetxl.integrations.transformers import check_one_class, from_pretrained, pipeline

CLASSES = 7
VOCABULARY = 40
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "num_labels": CLASSES, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "num_labels": CLASSES,
    "pad_token_id": 0,
}  # fmt: skip
DISTIL = {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "num_labels": CLASSES}
IMAGE = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32,
    "patch_size": 8, "num_labels": CLASSES,
}  # fmt: skip
STAGES = {"num_labels": CLASSES, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
SWIN = {
    "num_labels": CLASSES, "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1], "num_heads": [2],
    "window_size": 4,
}  # fmt: skip
MODELS = {
    "ViTForImageClassification": IMAGE,
    "ResNetForImageClassification": STAGES,
    "ConvNextForImageClassification": {
        "num_labels": CLASSES,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_stages": 2,
    },
    "SwinForImageClassification": SWIN,
    "Dinov2ForImageClassification": IMAGE,
    "BeitForImageClassification": IMAGE,
    "RegNetForImageClassification": STAGES | {"groups_width": 8},
    "BertForSequenceClassification": TEXT,
    "RobertaForSequenceClassification": TEXT | {"max_position_embeddings": 40},
    "DistilBertForSequenceClassification": DISTIL,
    "DebertaV2ForSequenceClassification": TEXT,
    "ElectraForSequenceClassification": TEXT | {"embedding_size": 16},
    "GPT2ForSequenceClassification": GPT2,
    "LlamaForSequenceClassification": TEXT | {"num_key_value_heads": 2},
    "BertForTokenClassification": TEXT,
    "DistilBertForTokenClassification": DISTIL,
    "BertForMaskedLM": TEXT,
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": TEXT | {"num_key_value_heads": 2},
}
"""Classes, and configurations that make them small."""
LOGGER = logging.getLogger("transformers")


@pytest.fixture(autouse=True)
def _quiet():
    level = LOGGER.level
    LOGGER.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    yield
    LOGGER.setLevel(level)


def make(name, **more):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**MODELS[name], **more)).eval()


def inputs_for(name):
    generator = torch.Generator().manual_seed(3)
    if "Image" in name:
        return {"pixel_values": torch.randn(3, 3, 32, 32, generator=generator)}, torch.tensor([0, 6, 2])
    tokens = torch.randint(1, VOCABULARY, (3, 9), generator=generator)
    tokens[1, 6:] = 0
    inputs = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    if "Sequence" in name:
        return inputs, torch.tensor([0, 6, 2])
    classes = CLASSES if "Token" in name else VOCABULARY
    labels = torch.randint(classes, (3, 9), generator=generator)
    return inputs, labels.masked_fill(tokens == 0, -100)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # DeBERTa, when imported
def test_transformers_architectures_are_converted(name, tmp_path):
    model = make(name)
    inputs, labels = inputs_for(name)
    with torch.no_grad():
        before = model(**inputs, labels=labels)
        keys = list(model.state_dict())
        deterministic = hetxl.convert(copy.deepcopy(model), head="det")
        output = deterministic(**inputs, labels=labels)
        assert torch.equal(output.logits, before.logits)
        torch.testing.assert_close(output.loss, before.loss)
        assert list(deterministic.state_dict()) == keys
        assert hetxl.convert(model, rank=3, train_samples=4, eval_samples=8) is model
        assert set(keys) < set(model.state_dict())
        assert torch.equal(mean_logits(model, inputs), before.logits)

    model.train()
    output = model(**inputs, labels=labels)
    assert output.logits is None
    output.loss.backward()
    head = head_of(model)
    assert head.weight.grad.abs().sum() > 0
    assert head.covariance.factor.grad.abs().sum() > 0
    torch.optim.SGD(model.parameters(), lr=0.01).step()

    model.eval().save_pretrained(tmp_path)
    other = from_pretrained(tmp_path)
    assert type(other) is type(model)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    probs = [
        hetxl.predict(computed, inputs, generator=torch.Generator().manual_seed(1)).probs
        for computed in (model, other.eval())
    ]
    torch.testing.assert_close(*probs)  # weights from a file lie elsewhere in memory: the last bits may differ
    evaluated = model(**inputs, labels=labels)
    torch.testing.assert_close(evaluated.logits.exp().sum(-1), torch.ones(evaluated.logits.shape[:-1]))
    assert evaluated.loss.isfinite()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForTokenClassification", "LlamaForSequenceClassification"])
def test_the_fused_loss_of_training_is_the_loss_of_the_output(name):
    model = hetxl.convert(make(name), "det")
    inputs, labels = inputs_for(name)
    expected = make(name)(**inputs, labels=labels).loss
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.testing.assert_close(model(**inputs, labels=labels).loss, expected)
    count = int((F.pad(labels, (0, 1), value=-100)[:, 1:] if "LM" in name else labels).ne(-100).sum())
    half = model(**inputs, labels=labels, num_items_in_batch=torch.tensor(2 * count)).loss
    torch.testing.assert_close(half, expected / 2)


def test_evaluation_averages_probabilities_over_the_noise():
    model = hetxl.convert(make("ViTForImageClassification"), noise_init=3.0, eval_samples=4000)
    inputs, labels = inputs_for("ViTForImageClassification")
    with torch.no_grad():
        output = model(**inputs, labels=labels)
    expected = hetxl.predict(model, inputs, num_samples=4000, generator=torch.Generator().manual_seed(0)).probs
    torch.testing.assert_close(output.logits.exp(), expected, atol=0.02, rtol=0)
    torch.testing.assert_close(output.loss, F.nll_loss(output.logits, labels))


def test_tied_embeddings_stay_tied_through_files(tmp_path):
    model = hetxl.convert(make("GPT2LMHeadModel"), rank=2)
    assert model.lm_head.weight is model.transformer.wte.weight
    model.save_pretrained(tmp_path)
    other = from_pretrained(tmp_path)
    assert other.lm_head.weight is other.transformer.wte.weight
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs, _ = inputs_for("GPT2LMHeadModel")
    torch.testing.assert_close(plain.eval()(**inputs).logits, mean_logits(other.eval(), inputs))


@pytest.mark.parametrize("size", [VOCABULARY + 8, VOCABULARY - 8])
@pytest.mark.parametrize(
    ("name", "tied"), [("GPT2LMHeadModel", True), ("LlamaForCausalLM", False), ("BertForMaskedLM", True)]
)
def test_resizing_tokens_keeps_the_head(name, tied, size, tmp_path):
    model = hetxl.convert(make(name), rank=2, eval_samples=8)
    head, noise, old_tokens, calls = head_of(model), head_of(model).covariance.factor, min(VOCABULARY, size), []
    head.register_forward_hook(lambda *call: calls.append(call))
    tokens, labels = torch.tensor([[3, 5, 7]]), torch.tensor([[5, size - 1, -100]])
    before = mean_logits(model, tokens)
    model.resize_token_embeddings(size)
    assert head_of(model) is head
    assert head.covariance.factor is noise
    assert head.num_classes == size
    assert (head.weight is model.get_input_embeddings().weight) == tied
    after = mean_logits(model, tokens)
    assert after.shape == (1, 3, size)
    torch.testing.assert_close(after[..., :old_tokens], before[..., :old_tokens])
    assert len(calls) == 2
    assert model.train()(tokens, labels=labels).loss.isfinite()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(mean_logits(from_pretrained(tmp_path).eval(), tokens), mean_logits(model.eval(), tokens))


def test_resized_tokens_beside_a_head():
    model = hetxl.convert(make("BertForSequenceClassification"), "het", rank=2)
    inputs, _ = inputs_for("BertForSequenceClassification")
    before = mean_logits(model, inputs)
    model.resize_token_embeddings(VOCABULARY + 8)
    torch.testing.assert_close(mean_logits(model, inputs), before)


def test_noise_that_was_made_for_the_tokens():
    model = hetxl.convert(make("GPT2LMHeadModel"), "het", rank=2)
    with pytest.raises(ValueError, match=r"HetLayer was made for 40 tokens; resize before hetxl\.convert\(model\)"):
        model.resize_token_embeddings(VOCABULARY + 8)
    assert head_of(model).weight is model.get_input_embeddings().weight


def test_options_are_remembered(tmp_path):
    temperature = hetxl.LearnedTemperature(init=1.5)
    model = hetxl.convert(make("BertForSequenceClassification"), "het-h", buckets=6, temperature=temperature, rank=2)
    with torch.no_grad():
        temperature.raw += 0.5
    model.save_pretrained(tmp_path)
    head = head_of(from_pretrained(tmp_path))
    assert (head.buckets, head.covariance.rank, head.temperature.init) == (6, 2, 1.5)
    assert torch.equal(head.temperature(), temperature())
    assert torch.equal(head.hash, head_of(model).hash)


def test_rescaled_head_is_saved_with_its_scales(tmp_path):
    model = hetxl.convert(make("BertForSequenceClassification"), rank=2, temperature=hetxl.LearnedTemperature(init=1.5))
    head = head_of(model)
    head.temperature, head.noise_scale = hetxl.FixedTemperature(0.5), 0.25
    model.save_pretrained(tmp_path)
    loaded = head_of(from_pretrained(tmp_path))
    assert (loaded.temperature(), loaded.noise_scale) == (0.5, 0.25)


def test_going_back_gives_the_class_and_configuration_back(tmp_path):
    model = make("BertForSequenceClassification")
    kind = type(model)
    hetxl.revert(hetxl.convert(model))
    assert type(model) is kind
    model.save_pretrained(tmp_path)
    assert not hasattr(transformers.AutoConfig.from_pretrained(tmp_path), "hetxl")
    with pytest.raises(ValueError, match="without a head of hetxl"):
        from_pretrained(tmp_path)


def test_generate_keeps_the_prompt():
    model = hetxl.convert(make("GPT2LMHeadModel"), rank=2, eval_samples=8)
    tokens = torch.tensor([[5, 6, 7]])
    generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False)
    assert generated.shape[1] <= 7
    assert torch.equal(generated[:, :3], tokens)


def test_positional_inputs_and_tuple_outputs_work():
    model = hetxl.convert(make("BertForSequenceClassification"))
    inputs, labels = inputs_for("BertForSequenceClassification")
    loss, logits = model(inputs["input_ids"], inputs["attention_mask"], labels=labels, return_dict=False)[:2]
    assert (loss.dim(), logits.shape) == (0, (3, CLASSES))


def test_several_labels_for_an_example():
    model = make("BertForSequenceClassification", problem_type="multi_label_classification")
    hetxl.convert(model, bias_init=None)
    inputs, _ = inputs_for("BertForSequenceClassification")
    labels = torch.eye(CLASSES)[:3]
    assert head_of(model).link == "sigmoid"
    evaluated = model(**inputs, labels=labels)
    expected = F.binary_cross_entropy_with_logits(evaluated.logits, labels, reduction="none").sum(-1).mean()
    torch.testing.assert_close(evaluated.loss, expected)
    model.train()(**inputs, labels=labels).loss.backward()
    with pytest.raises(ValueError, match=r"does not fit config\.problem_type"):
        hetxl.convert(make("BertForSequenceClassification", problem_type="multi_label_classification"), link="softmax")


def test_from_pretrained_passes_source_options_to_the_configuration(tmp_path, monkeypatch):
    hetxl.convert(make("BertForSequenceClassification"), rank=2).save_pretrained(tmp_path / "sub")
    seen, read = [], transformers.AutoConfig.from_pretrained

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return read(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", spy)
    source_options = {"subfolder": "sub", "revision": "main", "token": "t", "cache_dir": str(tmp_path / "cache")}
    source_options |= {"local_files_only": True, "force_download": False, "proxies": None}
    model = from_pretrained(tmp_path, **source_options, output_attentions=True, dtype=torch.bfloat16)
    assert seen == [source_options]
    assert model.config.output_attentions
    assert head_of(model).covariance.factor.dtype == torch.bfloat16
    for config in (model.config, tmp_path / "sub", str(tmp_path / "sub")):
        assert head_of(from_pretrained(tmp_path / "sub", config=config)).covariance.rank == 2


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("BertForQuestionAnswering", TEXT, "does not return one distribution over classes"),
        ("BertModel", TEXT, "does not return one distribution over classes"),
        ("BertForSequenceClassification", TEXT | {"num_labels": 1}, "regression"),
        ("DeiTForImageClassificationWithTeacher", IMAGE, "does not return one distribution"),
    ],
)
def test_other_models_are_refused(name, config, message):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config))
    with pytest.raises(ValueError, match=message):
        hetxl.convert(model)
    assert type(model) is kind


def test_options_unfit_for_the_configuration_raise():
    with pytest.raises(ValueError, match="sampler is a function"):
        hetxl.convert(make("BertForSequenceClassification"), sampler=hetxl.functional.iid)
    with pytest.raises(ValueError, match="temperature is a ReLU"):
        hetxl.convert(make("BertForSequenceClassification"), temperature=torch.nn.ReLU())


def test_the_signature_is_the_models_own():
    model = make("ViTForImageClassification")
    before = inspect.signature(type(model).forward)
    assert inspect.signature(type(hetxl.convert(model)).forward) == before


class Examples(torch.utils.data.Dataset):
    """Images whose class is their colour."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        self.images = 0.3 * torch.randn(count, 3, 32, 32, generator=generator)
        bits = torch.stack([(self.labels >> bit) & 1 for bit in range(3)], -1)
        self.images += 2 * bits[:, :, None, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return {"pixel_values": self.images[row], "labels": self.labels[row]}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_the_trainer_trains_and_evaluates(tmp_path):
    model = hetxl.convert(make("ViTForImageClassification"), rank=4, train_samples=4, eval_samples=16)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=40, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=1e-2, report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Examples(256, 0), eval_dataset=Examples(64, 1))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * before
    output = trainer.predict(Examples(64, 1))
    torch.testing.assert_close(torch.from_numpy(output.predictions).exp().sum(-1), torch.ones(64))
    assert (output.predictions.argmax(-1) == output.label_ids).mean() > 0.8
    trainer.save_model(str(tmp_path / "saved"))
    other = from_pretrained(tmp_path / "saved").eval()
    images = torch.stack([Examples(8, 1)[row]["pixel_values"] for row in range(8)])
    torch.testing.assert_close(mean_logits(other, images), mean_logits(model.eval(), images))


TOKENS = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(3))
SEVERAL = {"problem_type": "multi_label_classification"}


def make_bert(kind=BertForSequenceClassification, **options):
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
def test_label_rows_give_their_cross_entropy(kind, options, shape):
    model = hetxl.convert(make_bert(kind, **options), "det")
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
    model = hetxl.convert(make_bert()).train(training)
    assert model(TOKENS, labels=labels).loss.isfinite()
    for wrong, total in ((several, "2"), (0 * labels, "0")):
        with pytest.raises(
            ValueError, match=f'sums to {total}, .*problem_type="multi_label_classification", or convert with'
        ):
            model(TOKENS, labels=wrong)
    for options, links in (
        ({}, {"link": "softmax"}),
        ({}, {"link": "sigmoid"}),
        (SEVERAL, {}),
        ({"problem_type": "single_label_classification"}, {}),
    ):
        model = hetxl.convert(make_bert(**options), **links).train(training)
        assert model(TOKENS, labels=several).loss.isfinite()


def test_check_one_class_accepts_ids_and_probabilities():
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
    trainer = Trainer(hetxl.convert(make_bert(**options), "det"), arguments, train_dataset=data, eval_dataset=data)
    assert trainer.train().training_loss == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)


@pytest.fixture
def tokenizer():
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "red", "green", "blue", "fish", "bird"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")


def test_what_a_tokenizer_returns_is_taken_as_it_is(tokenizer):
    model = hetxl.convert(make_bert(), rank=2, eval_samples=8).eval()
    batch = tokenizer(["red fish", "a green bird"], padding=True, return_tensors="pt")
    assert not isinstance(batch, dict)
    seeds = (torch.Generator().manual_seed(1) for _ in range(2))
    probs = [hetxl.predict(model, inputs, generator=next(seeds)).probs for inputs in (batch, dict(batch))]
    assert torch.equal(*probs)
    assert hetxl.fused_loss(model, batch, torch.tensor([1, 2])).isfinite()


def test_logits_are_returned_in_training_if_asked_for():
    model = hetxl.convert(make_bert(), rank=2, train_samples=4, train_logits=True).train()
    labels = torch.tensor([0, 6, 2])
    output = model(TOKENS, labels=labels)
    torch.testing.assert_close(F.cross_entropy(output.logits, labels), output.loss)
    output.loss.backward()
    assert head_of(model).covariance.factor.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_a_trainer_with_a_loss_of_its_own_gets_logits(tmp_path):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.get("logits"), inputs.get("labels"))
            return (loss, outputs) if return_outputs else loss

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        save_strategy="no", use_cpu=True, logging_strategy="no",
    )  # fmt: skip
    model = hetxl.convert(make("ViTForImageClassification"), rank=2, train_samples=4, train_logits=True)
    assert Own(model, arguments, train_dataset=Examples(8, 0)).train().global_step == 2


@pytest.mark.parametrize("options", [{}, SEVERAL])
def test_pipelines_return_uncertainty(options, tokenizer):
    model = hetxl.convert(make_bert(**options), rank=2, noise_init=1.0, eval_samples=64).eval()
    texts = ["red fish", "green", "blue bird fish"]
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, return_uncertainty=True)
    results = classify(texts, top_k=2, batch_size=2)
    assert [len(result) for result in results] == [2, 2, 2]
    for text, result in zip(texts, results, strict=True):
        prediction = hetxl.predict(model, tokenizer(text, return_tensors="pt"), top_k=2)
        assert result[0]["entropy"] == pytest.approx(float(prediction.entropy), rel=1e-4)
        assert result[0]["score"] == pytest.approx(float(prediction.probs[0, 0]), rel=1e-4)
        assert 0 < result[1]["mutual_information"] < result[1]["entropy"]
    assert set(classify("red fish", return_uncertainty=False)[0]) == {"label", "score"}
    assert set(classify("red fish")[0]) == {"label", "score", "entropy", "mutual_information"}


def test_pipelines_load_saved_models(tokenizer, tmp_path):
    model = hetxl.convert(make_bert(), rank=2).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = pipeline("text-classification", model, tokenizer=tokenizer, return_uncertainty=True)("red fish")
    for name in (tmp_path, str(tmp_path)):
        assert pipeline("text-classification", name, return_uncertainty=True)("red fish") == expected


def test_pipelines_without_a_head_or_for_other_tasks_are_refused(tokenizer):
    with pytest.raises(ValueError, match="no converted layer"):
        pipeline("text-classification", model=make_bert(), tokenizer=tokenizer)
    language_model = hetxl.convert(make("GPT2LMHeadModel"), rank=2)
    with pytest.raises(ValueError, match=r"task must be one of .*text-classification.*found 'text-gen"):
        pipeline("text-generation", model=language_model, tokenizer=tokenizer)
