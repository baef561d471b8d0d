"""Predictions of processes that share the classes."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support.distributed import gradients
from support.sharded import B, D, setting


def predictions(rank: int, ranks: int) -> dict[str, Any]:
    """Predictions of every case, and what may be read from them."""
    mesh = init_device_mesh("cpu", (ranks,))
    return {name: prediction(name, mesh) for name in PREDICTED} | {"alone": alone(mesh)}


PREDICTED = {
    "det softmax": {"top_k": 5},
    "samples first": {"top_k": 5, "memory_budget": 1},
    "factors first": {},
    "processes without classes": {"top_k": 3},
    "low rank": {"top_k": 1, "method": "deterministic"},
    "diagonal": {"top_k": 4},
    "det sigmoid": {},
    "sigmoid lists": {"top_k": 5},
    "sigmoid, processes without classes": {"top_k": 2},
    "sigmoid rows": {},
}


def prediction(name: str, mesh: DeviceMesh | None = None, plain: bool = False) -> dict[str, Any]:
    """A prediction, and the same head's log-probabilities and logits; inputs [2, 4, D]."""
    model, inputs, _, options = setting(name, mesh, plain)
    head, special = model.eval().head, dict(PREDICTED[name])
    head.memory_budget = special.pop("memory_budget", None)
    features, noise = torch.tanh(model.backbone(inputs)).view(2, B // 2, D), options.get("noise")
    if noise is not None and noise.dim() == 3:
        noise = noise.view(2, B // 2, *noise.shape[1:])
    order = options.get("order")
    predicted = head.predict(features, noise=noise, tolerance=0.0, order=order, **special)
    with torch.no_grad():
        logits = head.logit_distribution(features)
        result = {
            "probs": predicted.probs,
            "log_probs": predicted.log_probs,
            "indices": predicted.indices,
            "entropy": predicted.entropy,
            "expected_entropy": predicted.expected_entropy,
            "covariance": predicted.covariance,
            "correlation": predicted.correlation,
            "logit_variance": predicted.logit_variance,
            "other covariance": logits.covariance(torch.zeros(2, B // 2, 1, dtype=torch.int64)),
            "mean": logits.mean,
            "all log_probs": head(features, noise=noise, order=order),
        }
    features = features.detach().requires_grad_()
    classes = torch.arange(3).expand(2, B // 2, 3)
    classifier = head.classifier
    few = classifier(features).gather(-1, classes) if plain else classifier.logits_of(features, classes)
    (few * torch.arange(3)).sum().backward(retain_graph=True)
    classifier(features).square().sum().backward()
    return result | {"few": few.detach(), "features": features.grad} | gradients(classifier)


def alone(mesh: DeviceMesh) -> dict[str, Any]:
    """What the first process may do by itself, and other small things."""
    model, inputs, targets, options = setting("samples first", mesh)
    predicted = model.head.predict(inputs, top_k=2, noise=options["noise"])
    traffic = model.head.classifier.traffic.bytes, model.head.classifier.traffic.calls
    result: dict[str, Any] = {"traffic": traffic, "line": predicted.describe() if dist.get_rank() == 0 else ""}
    copied = copy.deepcopy(model)
    result["copied"] = copied(inputs, targets, **options).item(), model(inputs, targets, **options).item()
    result["empty"] = model(inputs[:0], targets[:0]).item()
    torch.manual_seed(7)
    linear = nn.Linear(D, 11, dtype=torch.float64)
    whole = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model.head.classifier, linear.state_dict(), options=whole)
    with torch.no_grad():
        result["from linear"] = model.head.classifier(inputs), linear(inputs)
    nn.init.constant_(model.head.classifier.bias, -10.0)
    result["bias"] = model.head.classifier.affine().bias.detach()
    exact = model(inputs, targets, noise=options["noise"]).item()
    half = model.bfloat16()
    result["half"] = half(inputs.bfloat16(), targets, noise=options["noise"].bfloat16()).item(), exact
    return result
