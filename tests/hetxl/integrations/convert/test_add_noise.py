"""`hetxl.add_noise`: a trained model gets noise, or stays as it was."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetxl
from hetxl.integrations.convert import head_of

D, K = 8, 6


def model_and_rows(noise: float) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return a model with labels of its own making, disturbed by noise before the last layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, K)).eval()
    with torch.no_grad():
        model[3].weight.mul_(8)
        inputs = torch.randn(600, D)
        hidden = model[:2](inputs)
        probs = (model[3](hidden + noise * torch.randn(600, 1) * torch.randn(16)) / 0.3).softmax(-1)
        probs = probs if noise else model(inputs).softmax(-1)
        labels = torch.multinomial(probs, 1)[:, 0]
    return model.train(), inputs, labels


def test_trained_model_gets_noise_and_keeps_its_mean_logits():
    model, inputs, labels = model_and_rows(noise=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        logits = model.eval()(inputs)
    model.train()
    noisy = hetxl.add_noise(model, (inputs, labels), folds=2, steps=60)
    assert noisy is model
    assert model.training  # the mode that it was in
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    model.eval()
    tau = float(head_of(model).temperature())
    assert torch.allclose(hetxl.integrations.convert.mean_logits(model, inputs) * tau, logits, atol=1e-5)
    prediction = hetxl.predict(model, inputs, generator=torch.Generator().manual_seed(0))
    assert float(prediction.mutual_information.mean()) > 0
    loss = nn.functional.nll_loss(prediction.log_probs, labels)
    assert loss < nn.functional.cross_entropy(logits, labels) - 0.02


def test_model_stays_as_it_was_where_nothing_helps():
    model, inputs, labels = model_and_rows(noise=0)
    with torch.no_grad():
        before = model.eval()(inputs)
    with pytest.warns(UserWarning, match="noise does not help") as caught:
        model = hetxl.add_noise(model, (inputs, labels), folds=2, steps=20)
    if "as it was" in str(caught[0].message):
        assert type(model[3]) is nn.Linear
    with torch.no_grad():
        after = model(inputs)
    assert torch.allclose(after.softmax(-1), before.softmax(-1), atol=0.1)


def test_batches_and_arrays_give_the_same():
    results = []
    for kind in ("arrays", "loader", "dicts"):
        model, inputs, labels = model_and_rows(noise=0.5)
        data = {
            "arrays": (inputs.numpy(), labels.numpy()),
            "loader": DataLoader(TensorDataset(inputs, labels), batch_size=64),
            "dicts": [{"input": inputs, "labels": labels}],
        }[kind]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model = hetxl.add_noise(model, data, folds=2, steps=5)
        results.append(float(head_of(model).temperature()))
    assert results[0] == pytest.approx(results[1], abs=1e-4)
    assert results[0] == pytest.approx(results[2], abs=1e-4)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((torch.zeros(4, D), torch.zeros(3)), ValueError, "a target for each input, got 4 and 3"),
        (5, TypeError, "data must be"),
        ([], ValueError, "at least one batch"),
        ([torch.zeros(4, D)], TypeError, "a batch of data must be"),
        ((torch.zeros(40, D), torch.zeros(40, K)), ValueError, "targets must be class ids of shape"),
    ],
)
def test_wrong_data_is_refused_and_the_model_stays(data: object, error: type[Exception], message: str):
    model = nn.Sequential(nn.Linear(D, K))
    with pytest.raises(error, match=message):
        hetxl.add_noise(model, data)
    assert type(model[0]) is nn.Linear
