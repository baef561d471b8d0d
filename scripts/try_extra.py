"""Import, train once and predict once with one extra alone.

`pip install 'hetxl[EXTRA]' && python scripts/try_extra.py EXTRA`; "none" is the library without extras.
"""

import os
import sys
import tempfile

HEAD = """
import torch, hetxl
head = hetxl.HetXLHead(4, 7, rank=2, train_samples=4, eval_samples=16)
features, labels = torch.randn(32, 4), torch.arange(32) % 7
optimizer = torch.optim.AdamW(head.parameters())
head(features, labels).backward()
optimizer.step()
prediction = head.eval().predict(features, top_k=2)
"""
COMMAND = """
import subprocess, sys
help = subprocess.check_output([sys.executable, "-m", "hetxl_train.cli", "train", "--help"], text=True)
assert "--learning-rate" in help
from hetxl_train import TrainConfig, train
from hetxl_train.prediction import Predictor
data = "synthetic:rows=500,classes=7,features=4"
run = train(TrainConfig(data=data, steps=4, batch_size=64, rank=2, eval_samples=16, workers=0, out="run", **options))
prediction = Predictor(run.path).trained.model.head.predict(torch.randn(3, 4), top_k=2)
"""
BERT = """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 7}
model = hetxl.convert(BertForSequenceClassification(BertConfig(intermediate_size=24, **sizes)), rank=2)
data = [{"input_ids": torch.randint(1, 40, (9,)), "labels": row % 7} for row in range(16)]
Trainer(model, TrainingArguments("out", max_steps=2, report_to=[], use_cpu=True), train_dataset=data).train()
prediction = hetxl.predict(model.eval(), {"input_ids": torch.randint(1, 40, (3, 9))}, top_k=2)
"""
TRIALS = {
    "none": "",
    "train": "options = {}" + COMMAND,
    "serve": "options = {}"
    + COMMAND
    + "from hetxl_train.serve import build_app; build_app(Predictor(run.path)).openapi()",
    "tensorboard": "from torch.utils.tensorboard import SummaryWriter; SummaryWriter('out').add_scalar('loss', 1.0, 0)",
    "wandb": "import wandb; wandb.init(mode='offline').log({'loss': 1.0}); wandb.finish()",
    "mlflow": "import mlflow; mlflow.MlflowClient('file:out').create_experiment('hetxl')",
    "timm": """
import timm
model = hetxl.convert(timm.create_model("resnet18", num_classes=7), rank=2)
hetxl.fused_loss(model, torch.randn(4, 3, 64, 64), labels[:4]).backward()
prediction = hetxl.predict(model.eval(), torch.randn(2, 3, 64, 64), top_k=2)
""",
    "hf": BERT,
    "clip": """
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from hetxl.integrations.open_clip import loss_for, wrap, zero_shot_head
vision = CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
text = CLIPTextCfg(context_length=8, vocab_size=40, width=32, heads=2, layers=1)
model = wrap(CLIP(16, vision, text, output_dict=True))
images, texts = torch.randn(6, 3, 16, 16), torch.randint(1, 40, (6, 8))
loss_for(model)(**model(images, texts)).backward()
weights = model.encode_text(texts, normalize=True)
prediction = zero_shot_head(model, weights).predict(model.encode_image(images, normalize=True), top_k=2)
""",
    "lightning": """
import lightning.pytorch as pl
from hetxl.integrations.lightning import HetXLModule
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, labels), batch_size=16)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(module := HetXLModule(torch.nn.Linear(4, 4), head), loader)
trainer.predict(module, loader)
""",
    "sklearn": """
from hetxl.integrations.sklearn import HetXLClassifier
model = HetXLClassifier(max_iter=2, rank=2).fit(features.numpy(), labels.numpy())
model.predict_uncertainty(features.numpy())
""",
    "tune": """
from hetxl_train import TrainConfig
from hetxl_train.search.methods import Search
from hetxl_train.search.tune import tune
data = "synthetic:rows=500,classes=7,features=4"
tune(TrainConfig(data=data, steps=2, rank=2, eval_samples=16, workers=0, out="tuned"), Search("bayes", trials=3))
""",
    "retrieval": """
from hetxl.classifiers import RetrievedClassifier
head = hetxl.HetXLHead(4, 500, rank=2, classifier=RetrievedClassifier(4, 500))
head(features, labels).backward()
prediction = head.eval().predict(features, top_k=2)
""",
    "onnx": """
from hetxl.integrations.export import exportable, to_onnx
assert to_onnx(exportable(head, uncertainty=True), "head.onnx", features) < 1e-5
""",
}
"""What is tried with each extra, behind a head that is trained."""

if __name__ == "__main__":
    (extra,) = sys.argv[1:] or ["none"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        names: dict[str, object] = {}
        exec(HEAD + TRIALS[extra], names)
        os.chdir("/")
    print(f"{extra}: {names['prediction']}")
