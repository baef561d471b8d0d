"""A head under accelerate: trained, evaluated, saved and loaded with what accelerate keeps."""

import torch
from accelerate import Accelerator
from torch import nn

import hetxl
from support.lightning_runs import D, K, examples, loader


class Classifier(nn.Module):
    """A layer with a head; the loss goes through `forward`, where accelerate has its hooks."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(D, 16), hetxl.HetXLHead(16, K, rank=2, train_samples=4, eval_samples=16)

    def forward(self, inputs, targets=None, reduction="mean"):
        return self.head(self.backbone(inputs), targets, reduction=reduction)


def prepared():
    accelerator = Accelerator(cpu=True)
    model = Classifier()
    return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.03))


def test_runs_are_trained_evaluated_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    accelerator, model, optimizer = prepared()
    batches, tests = accelerator.prepare(loader(*examples()), loader(*examples(64, seed=1)))

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(*batch, reduction="none")) for batch in tests]
        model.train()
        return float(torch.cat(losses).mean())

    before = evaluate(model)
    for inputs, labels in 5 * list(batches):
        optimizer.zero_grad()
        accelerator.backward(model(inputs, labels))
        optimizer.step()
    after = evaluate(model)
    assert after < 0.5 * before
    accelerator.save_state(tmp_path)
    accelerator, again, _ = prepared()
    accelerator.load_state(tmp_path)
    assert evaluate(again) == after
    features = model.backbone(examples(5, seed=2)[0])
    prediction = accelerator.unwrap_model(again).eval().head.predict(features)
    assert torch.equal(prediction.probs, model.eval().head.predict(features).probs)
    assert (prediction.mutual_information > 0).all()
