"""The three compared methods, DET, samples first and hetxl, as steps for measurements of time and memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetxl
from hetxl.functional import Targets, iid, reference
from hetxl.profiling import build_backbone

THREADS = 2

Method = Literal["det", "samples", "hetxl"]
METHODS: dict[Method, str] = {"det": "DET", "samples": "samples first", "hetxl": "hetxl"}
"""The methods by their names in tables."""


@dataclass(frozen=True)
class Case:
    """One step of one method.

    Attributes:
        method: "det" is nn.Linear and cross_entropy; "samples" the paper's evaluation, all S samples through the
            classifier under autograd; "hetxl" the head as users call it.
        batch: B
        features: D
        classes: K
        samples: S
        rank: R
        task: "loss" with its backward pass; "predict"; or "train", a whole step of a ResNet152 with its optimiser.
        head: "het-xl" or "het"
        link: "softmax" or "sigmoid"
        pixels: side of the images of "train".
    """

    method: Method
    batch: int
    features: int
    classes: int
    samples: int
    rank: int = 50
    task: Literal["loss", "predict", "train"] = "loss"
    head: str = "het-xl"
    link: str = "softmax"
    pixels: int = 224

    def by(self, method: Method) -> "Case":
        """Return the same step with another method."""
        return replace(self, method=method)

    def tiny(self) -> "Case":
        """Return the same step, so small that it only initialises the libraries."""
        features = self.features if self.task == "train" else 8
        return replace(self, batch=2, features=features, classes=10, samples=2, rank=2, pixels=32)


def prepare(case: Case) -> Callable[[], object]:
    """Build the tensors of a case and return its step."""
    torch.manual_seed(0)
    head = _head(case)
    if case.task == "train":
        return _train(case, head)
    features, labels = torch.randn(case.batch, case.features), torch.randint(case.classes, (case.batch,))
    if case.task == "predict":
        return lambda: _predict(case, head, features)
    features.requires_grad_()  # as the backbone's gradients require

    def run() -> None:
        head.zero_grad(set_to_none=True)
        features.grad = None
        _loss(case, head, features, labels).backward()

    return run


def _head(case: Case) -> nn.Module:
    if case.method == "det":
        return nn.Linear(case.features, case.classes)
    options = {"rank": case.rank, "link": case.link, "temperature": 1.0}  # the defaults of versions differ
    return hetxl.nn.build_head(case.head, case.features, case.classes, **options)


def _loss(case: Case, head: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    if not isinstance(head, hetxl.nn.Head):
        return F.cross_entropy(head(features), labels)
    if case.method == "hetxl":
        return head.loss(features, labels, num_samples=case.samples)
    distribution = head.logit_distribution(features)
    z = iid(case.batch, case.samples, distribution.size)
    targets = Targets(ids=labels)
    return reference.mc_nll(distribution, z, targets, temperature=head.temperature(), link=head.link, order="samples")


@torch.no_grad()
def _predict(case: Case, head: nn.Module, features: Tensor) -> object:
    if not isinstance(head, hetxl.nn.Head):
        return head(features).softmax(-1)
    if case.method == "hetxl":
        return head.predict(features, num_samples=case.samples)
    distribution = head.logit_distribution(features)
    z = iid(case.batch, case.samples, distribution.size)
    return reference.mc_predict(distribution, z, temperature=head.temperature(), link=head.link, order="samples")


def _train(case: Case, head: nn.Module) -> Callable[[], None]:
    """Return a training step of backbone and head: forward, loss, backward, SGD with momentum."""
    backbone = build_backbone("resnet152").module.to_empty(device="cpu")
    for module in backbone.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    images = torch.randn(case.batch, 3, case.pixels, case.pixels)
    labels = torch.randint(case.classes, (case.batch,))
    optimiser = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=1e-4, momentum=0.9)

    def run() -> None:
        features = backbone(images).pooler_output.flatten(1)  # [B, D]
        loss = _loss(case, head, features, labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()

    return run
