"""LoRA before and after `convert`: trained, saved, loaded, disabled and merged, on heads of BERT, ViT and Llama."""

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import hetxl
from hetxl.integrations.convert import features_of, head_of
from hetxl.integrations.transformers import from_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT's call

CLASSES = 5
TEXT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32, "num_labels": CLASSES, "pad_token_id": 0,
}  # fmt: skip
IMAGE = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8, "num_labels": CLASSES,
}  # fmt: skip
MODELS = {
    "BertForSequenceClassification": (TEXT, ["query", "value"], "classifier"),
    "ViTForImageClassification": (IMAGE, "all-linear", "classifier"),
    "LlamaForSequenceClassification": (TEXT | {"num_key_value_heads": 2}, ["q_proj", "v_proj"], "score"),
}
OPTIONS = {"rank": 3, "train_samples": 4, "eval_samples": 16}
LABELS = torch.tensor([0, 4, 2])


def make(name):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**MODELS[name][0])).eval()


def lora(name, **options):
    _, targets, layer = MODELS[name]
    return LoraConfig(r=2, target_modules=targets, modules_to_save=[layer], init_lora_weights=False, **options)


def inputs_for(name):
    generator = torch.Generator().manual_seed(3)
    if "Image" in name:
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(1, 40, (3, 9), generator=generator)}


def adapted(name, order):
    """A converted model with LoRA, made in one of the two orders."""
    if order == "convert first":
        return get_peft_model(hetxl.convert(make(name), **OPTIONS), lora(name))
    model = get_peft_model(make(name), lora(name))
    assert hetxl.convert(model, **OPTIONS) is model
    return model


def predicted(model, inputs):
    return hetxl.predict(model.eval(), inputs, generator=torch.Generator().manual_seed(1)).probs


@pytest.mark.parametrize("order", ["convert first", "LoRA first"])
@pytest.mark.parametrize("name", MODELS)
def test_lora_trains_the_head_and_leaves_the_rest(name, order):
    model, inputs = adapted(name, order).train(), inputs_for(name)
    before = copy.deepcopy(model.state_dict())
    model(**inputs, labels=LABELS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    head = head_of(model)
    assert {id(head.weight), id(head.covariance.factor)} <= {id(p) for p in model.parameters() if p.requires_grad}
    assert all("lora_" in key or "modules_to_save" in key for key in changed)
    assert any("lora_" in key for key in changed)
    assert any(key.endswith("modules_to_save.default.covariance.factor") for key in changed)
    assert any(key.endswith("modules_to_save.default.weight") for key in changed)


@pytest.mark.parametrize("order", ["convert first", "LoRA first"])
@pytest.mark.parametrize("name", MODELS)
def test_merged_models_predict_as_adapted_ones_and_are_saved(name, order, tmp_path):
    model, inputs = adapted(name, order), inputs_for(name)
    nn.init.normal_(head_of(model).weight)
    expected = predicted(model, inputs)
    merged = model.merge_and_unload()
    torch.testing.assert_close(predicted(merged, inputs), expected)
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(predicted(from_pretrained(tmp_path), inputs), expected)
    layer = hetxl.revert(merged).get_submodule(MODELS[name][2])
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_saved_and_loaded_with_the_head(name, tmp_path):
    model, inputs = adapted(name, "convert first"), inputs_for(name)
    for parameter in head_of(model).parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(hetxl.convert(make(name), **OPTIONS), tmp_path)
    torch.testing.assert_close(predicted(loaded, inputs), predicted(model, inputs))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_trainer_trains_and_evaluates_adapters(tmp_path):
    model = adapted("BertForSequenceClassification", "convert first")
    data = [{"input_ids": torch.full((4,), 1 + row % CLASSES), "labels": row % CLASSES} for row in range(40)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=20, learning_rate=3e-2, report_to=[],
        disable_tqdm=True, save_strategy="no", use_cpu=True, logging_strategy="no", label_names=["labels"],
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.1


@pytest.mark.parametrize("order", ["convert first", "LoRA first"])
def test_disabled_adapters_give_the_model_as_it_was(order):
    name = "BertForSequenceClassification"
    model, inputs = adapted(name, order), inputs_for(name)
    nn.init.normal_(head_of(model).weight)
    plain = make(name)
    expected = plain(**inputs, labels=LABELS)
    with model.disable_adapter(), torch.no_grad():
        output = model.eval()(**inputs, labels=LABELS)
        if order == "LoRA first":  # the layer that was there before the head
            torch.testing.assert_close(output.logits, expected.logits)
            torch.testing.assert_close(output.loss, expected.loss)
        else:
            assert torch.equal(head_of(model).weight, plain.classifier.weight)
            torch.testing.assert_close(output.loss, F.nll_loss(output.logits, LABELS))
    assert not torch.equal(head_of(model).weight, plain.classifier.weight)


def test_the_head_of_the_active_adapter_is_used():
    name = "BertForSequenceClassification"
    model, inputs = adapted(name, "convert first"), inputs_for(name)
    model.add_adapter("other", lora(name))
    first = head_of(model)
    model.set_adapter("other")
    second = head_of(model)
    assert first is not second
    nn.init.normal_(second.weight)
    features = features_of(model.eval(), inputs)
    generators = (torch.Generator().manual_seed(1) for _ in range(2))
    expected, probs = (
        second.predict(features, generator=next(generators)).probs,
        hetxl.predict(model, inputs, generator=next(generators)).probs,
    )
    torch.testing.assert_close(probs, expected)


def test_converting_under_lora_never_proposes_an_unused_copy():
    name = "BertForSequenceClassification"
    model = get_peft_model(make(name), lora(name))
    with pytest.raises(ValueError, match="has no layer 'nothing'; its linear layers are: ") as error:
        hetxl.convert(model, layer="nothing")
    assert "original_module" not in str(error.value)
    assert "lora_" not in str(error.value)
    hetxl.convert(model, layer="classifier", **OPTIONS)
    assert head_of(model) is model.get_submodule("base_model.model.classifier.modules_to_save.default")
    with pytest.raises(ValueError, match=r"wrapped by PEFT.*merge_and_unload"):
        hetxl.revert(model)


@pytest.mark.parametrize(("name", "targets"), [("ViT", "all-linear"), ("Bert", ["query", "classifier"])])
def test_a_classifier_with_adapters_around_it_is_refused_with_the_remedy(name, targets):
    (name,) = (full for full in MODELS if full.startswith(name))
    model = get_peft_model(make(name), LoraConfig(r=2, target_modules=targets))
    for options in ({}, {"layer": "classifier"}, {"layer": "base_model.model.classifier"}):
        with pytest.raises(ValueError, match=r"'classifier'.*list it in modules_to_save"):
            hetxl.convert(model, **options)


@pytest.mark.parametrize("order", ["convert first", "LoRA first"])
def test_lora_on_a_timm_model_trains_its_head(order):
    config = LoraConfig(r=2, target_modules=["qkv"], modules_to_save=["head"])
    model: Any = timm.create_model("test_vit", num_classes=CLASSES)
    if order == "convert first":
        model = get_peft_model(hetxl.convert(model, **OPTIONS), config)
    else:
        model = hetxl.convert(get_peft_model(model, config), **OPTIONS)
    images = torch.randn(3, 3, 160, 160)
    F.cross_entropy(model.train()(images), LABELS).backward()
    head = model.get_submodule("base_model.model.head.modules_to_save.default")
    assert head_of(model) is head
    assert head.covariance.factor.grad.abs().max() > 0
    expected = predicted(model, images)
    torch.testing.assert_close(predicted(model.merge_and_unload(), images), expected)
