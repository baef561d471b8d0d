"""Models of other libraries, converted or with a head, go to ONNX with their uncertainty."""

import peft
import pytest
import timm
import torch
from accelerate import Accelerator
from sklearn.datasets import load_iris
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import hetxl
from hetxl.integrations.export import exportable, to_onnx
from hetxl.integrations.lightning import HetXLModule
from hetxl.integrations.sklearn import HetXLClassifier

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT's call

OPTIONS = {"rank": 2, "eval_samples": 8, "noise_init": 1.0}
TOKENS = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(9) < torch.tensor([[9], [4], [7]])).long()


def from_timm():
    sizes = {"layers": (1, 1, 1, 1), "base_width": 8, "num_classes": 5}
    return hetxl.convert(timm.create_model("resnet50", **sizes), **OPTIONS), {"x": torch.randn(3, 3, 32, 32)}


def from_transformers():
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 5}
    model = BertForSequenceClassification(BertConfig(intermediate_size=24, **sizes))
    return hetxl.convert(model, **OPTIONS), {"input_ids": TOKENS, "attention_mask": MASK}


def from_peft():
    model, inputs = from_transformers()
    config = peft.LoraConfig("SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    return peft.get_peft_model(model, config).merge_and_unload(), inputs


def from_lightning():
    return HetXLModule(nn.Linear(4, 8), hetxl.HetXLHead(8, 5, **OPTIONS)), {"inputs": torch.randn(3, 4)}


def from_accelerate():
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), hetxl.HetXLHead(8, 5, **OPTIONS))
    return accelerator.unwrap_model(accelerator.prepare(model)), {"inputs": torch.randn(3, 4)}


@pytest.mark.parametrize("build", [from_timm, from_transformers, from_peft, from_lightning, from_accelerate])
def test_models_are_exported_with_their_uncertainty(build, tmp_path):
    torch.manual_seed(0)
    model, inputs = build()
    model.eval()
    module = exportable(model, uncertainty=True)
    assert to_onnx(module, tmp_path / "a.onnx", list(inputs.values()), input_names=list(inputs)) < 1e-5
    outputs = dict(zip(module.output_names, module(*inputs.values()), strict=True))
    if hasattr(model, "hetxl_options"):
        prediction = hetxl.predict(model, inputs if len(inputs) > 1 else inputs["x"], noise=module.noise)
    else:
        *body, head = model.children() if isinstance(model, nn.Sequential) else (model.backbone, model.head)
        prediction = head.predict(nn.Sequential(*body)(inputs["inputs"]), noise=module.noise)
    for name in ("probs", "mutual_information"):
        torch.testing.assert_close(outputs[name], getattr(prediction, name), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_a_classifier_of_rows_is_exported_with_its_own_noise(tmp_path):
    rows, labels = load_iris(return_X_y=True)
    rows = rows.astype("float32")
    model = HetXLClassifier(max_iter=3, rank=2, random_state=0).fit(rows, labels)
    module = exportable(nn.Sequential(model.network_, model.network_.head), uncertainty=True)
    inputs = torch.from_numpy(rows[:20])
    assert to_onnx(module, tmp_path / "a.onnx", inputs) < 1e-5
    outputs = dict(zip(module.output_names, module(inputs), strict=True))
    torch.testing.assert_close(outputs["probs"], torch.from_numpy(model.predict_proba(rows[:20])), rtol=0, atol=1e-5)
    entropy = torch.from_numpy(model.predict_uncertainty(rows[:20]).entropy)
    torch.testing.assert_close(outputs["entropy"], entropy, rtol=0, atol=1e-4)
