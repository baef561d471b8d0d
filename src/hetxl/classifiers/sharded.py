"""W split over the classes among the processes of a mesh."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hetxl.classifiers.active import check_few
from hetxl.classifiers.collectives import (
    Ranks,
    Traffic,
    copy_to_ranks,
    gather_from_ranks,
    log_sum_exp_over_ranks,
    nothing,
    sum_over_ranks,
)
from hetxl.classifiers.sharded_labels import fingerprint, label_logits, local_ids, local_labels
from hetxl.classifiers.sharded_predict import Shard, ShardedLogits, gathered_log_probs, gathered_summary
from hetxl.functional import (
    Affine,
    LogitDistribution,
    Summary,
    Targets,
    Weights,
    log_mean_exp,
    mc_log_normalisers,
    mc_nll,
)
from hetxl.functional._checks import integer_at_least
from hetxl.functional._compile import not_compiled
from hetxl.functional.engine.softmax import NEVER
from hetxl.functional.weighting import reduce_losses
from hetxl.nn.classifier import Classifier
from hetxl.nn.noisy import NoisyFeatures
from hetxl.nn.prediction import TOP_CLASSES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BLOCK = 1024
"""Classes whose initial values are drawn together, so that they do not depend on who draws them."""

COMPARED = 8
"""Losses at the start of which the processes compare whether they see the same batch."""

WEIGHT, BIAS, NOISE = range(3)
"""Streams of random numbers that a seed stands for."""


class ShardedClassifier(Classifier):
    """Logits W φ + b, with W and b split over the classes among the processes of a device mesh.

    Every process of the mesh is given the same batch and computes the same loss; only numbers of each example and
    sample travel, never logits, so that traffic does not depend on K (`docs/several_devices.md`). W and b are DTensors,
    `Shard(0)` on the mesh: process r has the classes `classes`, ⌈K / processes⌉ of them, the last processes what is
    left, perhaps none. Their gradients stay where they are. Those of features, noise and τ come out whole and the same
    on every process.

    Under `DetHead`, and under `HetXLHead`, whose noise goes through W. Losses are for class ids (softmax) or labels in
    any form (sigmoid); predictions for the methods "mc" and "deterministic", over all classes whatever `tolerance` is.
    All methods but `affine` and `noise_generator` have to be called by all processes of the mesh.

    Args:
        in_features: D
        num_classes: K
        mesh: of one dimension; of a mesh (data, classes) pass `mesh["classes"]`. None for one process, which needs no
            process group.
        bias: whether there is a b.
        seed: of the initial values, which do not depend on the number of processes, and of the noise.
        stream: tells the noise of replicas apart. By default the lowest rank in the mesh, which differs between the
            rows of a mesh (data, classes).
        device: of the parameters; that of the mesh by default.
        dtype: of the parameters.

    Attributes:
        draws: how often noise was drawn in training, a part of the state: a run that goes on draws what it would have
            drawn.

    >>> ShardedClassifier(64, 1000).classes
    range(0, 1000)
    """

    complete = False
    draws: Tensor

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        mesh: "DeviceMesh | None" = None,
        bias: bool = True,
        seed: int = 0,
        stream: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, num_classes)
        self.seed = integer_at_least("seed", seed, 0)
        self._ranks = Ranks(mesh)
        self.stream = self._ranks.first if stream is None else integer_at_least("stream", stream, 0)
        if mesh is not None:
            device = _device_of(mesh, device)
        self.weight = self._parameter((num_classes, in_features), device, dtype)
        self.bias = self._parameter((num_classes,), device, dtype) if bias else None
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device=device))
        self._drawn: tuple[int, int, int] | None = None
        self._compared = 0
        self._top: tuple[NoisyFeatures, Tensor] | None = None
        self.reset_parameters()

    @property
    def mesh(self) -> "DeviceMesh | None":
        """The processes that share the classes."""
        return self._ranks.mesh

    @property
    def traffic(self) -> Traffic:
        """Bytes that this process handed to collectives, and how often."""
        return self._ranks.traffic

    @property
    def classes(self) -> range:
        """The classes that are here."""
        width = -(-self.num_classes // self._ranks.size)
        start = min(self._ranks.rank * width, self.num_classes)
        return range(start, min(start + width, self.num_classes))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters anew, as nn.Linear does, each block of classes from a seed of its own."""
        bound = 1 / math.sqrt(self.in_features)
        for stream, parameter in ((WEIGHT, self.weight), (BIAS, self.bias)):
            if parameter is None or parameter.is_meta:
                continue
            local = self._local(parameter)
            for block in range(self.classes.start // BLOCK, -(-self.classes.stop // BLOCK)):
                values = local.new_empty(BLOCK, *local.shape[1:])
                values.uniform_(-bound, bound, generator=self._generator(local.device, stream, block))
                first = max(self.classes.start, block * BLOCK)
                last = min(self.classes.stop, (block + 1) * BLOCK)
                here = slice(first - self.classes.start, last - self.classes.start)
                local[here] = values[first - block * BLOCK : last - block * BLOCK]
        if not self.draws.is_meta:
            self.draws.zero_()

    @not_compiled
    def forward(self, features: Tensor) -> Tensor:
        """Logits [..., K] of features [..., D], gathered from all processes: for few classes."""
        (features,) = copy_to_ranks(self._ranks, features)
        local = self.affine()(features)
        return gather_from_ranks(self._ranks, local, self.num_classes)

    @not_compiled
    def logits_of(self, features: Tensor, classes: Tensor) -> Tensor:
        """Logits [..., k] of classes [..., k], each from the process that has it."""
        (features,) = copy_to_ranks(self._ranks, features)
        shard = self._shard()
        rows, here = shard.rows(classes)
        found = (rows @ features.unsqueeze(-1)).squeeze(-1)
        if shard.affine.bias is not None and len(self.classes):
            bias = shard.affine.bias[local_ids(classes, self.classes).clamp(min=0)]
            found = found + torch.where(here, bias, 0.0)
        return sum_over_ranks(self._ranks, found)

    def affine(self) -> Affine:
        """W and b of the classes that are here."""
        return Affine(self._local(self.weight), None if self.bias is None else self._local(self.bias))

    def noise_generator(self) -> torch.Generator:
        """Where noise comes from: the same on every process of the mesh, and other noise for every loss in training.

        In evaluation mode it starts from the same place each time.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "ShardedClassifier cannot draw noise under activation checkpointing: the recomputation would draw "
                "other noise. Leave the head out of the checkpointed part, or pass the normals themselves as noise="
            )
        count = self._count()
        if self.training:
            self.draws += 1
            self._drawn = (id(self.draws), self._written(), count + 1)
        return self._generator(self.draws.device, NOISE, self.stream, count)

    @not_compiled
    def nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Negative log-likelihood of the targets, the same on every process: a scalar, or [...] for "none"."""
        if self._ranks.size == 1:
            return super().nll(noisy, targets, reduction, weights)
        check_few(noisy, targets, weights)
        self._compare(noisy, targets)
        noisy, tensors = self._copied(noisy)
        losses = self._label_losses if noisy.link == "sigmoid" else self._losses
        found = losses(noisy, tensors, targets, weights)
        factor, normaliser = weights.factors(targets, noisy.features.shape[:-1], noisy.link, found.detach())
        return reduce_losses(found, factor, normaliser, reduction)

    def _losses(self, noisy: NoisyFeatures, tensors: tuple[Tensor, ...], targets: Targets, weights: Weights) -> Tensor:
        """Softmax: −log mean_s p_s[y], [...], from the label's logit and the normaliser of all others."""
        assert targets.ids is not None
        own = local_ids(targets.ids, self.classes)
        if len(self.classes):
            affine = self.affine()
            others = mc_log_normalisers(
                noisy.through(affine), noisy.z, left_out=own, **noisy.evaluation_options()
            )  # [..., S]
            label = label_logits(affine, noisy, own)
        else:
            shape = torch.Size((*own.shape, 1 if noisy.z is None else noisy.z.shape[-2]))
            others, label = nothing(NEVER, shape, tensors), nothing(0.0, shape, tensors)
        others, label = log_sum_exp_over_ranks(self._ranks, others, label)
        # log p_s = label − log(exp(label) + exp(others)), also exact where p_s is nearly 1
        return -log_mean_exp(nn.functional.logsigmoid(label - others), dim=-1)

    def _label_losses(
        self, noisy: NoisyFeatures, tensors: tuple[Tensor, ...], targets: Targets, weights: Weights
    ) -> Tensor:
        """Sigmoid: the binary cross-entropies of all labels, summed, [...]."""
        if len(self.classes):
            here = slice(self.classes.start, self.classes.stop)
            found = mc_nll(
                noisy.through(self.affine()),
                noisy.z,
                local_labels(targets, self.classes),
                link="sigmoid",
                reduction="none",
                weights=Weights(classes=None if weights.classes is None else weights.classes[here]),
                **noisy.evaluation_options(),
            )
        else:
            found = nothing(0.0, noisy.features.shape[:-1], tensors)
        return sum_over_ranks(self._ranks, found)

    @not_compiled
    def log_probs(self, noisy: NoisyFeatures) -> Tensor:
        """Averaged log-probabilities [..., K], gathered: for few classes, and without gradients on several processes.

        `head.loss(features, targets)` trains, `head.predict(features, top_k=5)` predicts, neither with all K.
        """
        if self._ranks.size == 1:
            return super().log_probs(noisy)
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "log-probabilities of classes on several processes have no gradients: pass targets to the head for its "
                "loss, or call it under torch.no_grad() or in evaluation mode"
            )
        return gathered_log_probs(self._shard(), noisy)

    @not_compiled
    def predict(self, noisy: NoisyFeatures, method: str, top_k: int | None, tolerance: float) -> Summary:
        """Averaged probabilities with entropies, the same on every process; all K are gathered without `top_k`."""
        if self._ranks.size == 1:
            return super().predict(noisy, method, top_k, tolerance)
        if method not in ("mc", "deterministic"):
            raise ValueError(
                f"method={method!r} needs all classes in one process; with classes on {self._ranks.size} use "
                '"mc" or "deterministic"'
            )
        found = gathered_summary(self._shard(), noisy, method, top_k)
        indices = found.indices
        if indices is None:
            indices = found.log_probs.exp().topk(min(TOP_CLASSES, self.num_classes)).indices
        self._top = noisy, indices
        return found

    @not_compiled
    def distribution(self, noisy: NoisyFeatures) -> LogitDistribution:
        """The Gaussian over the logits of all classes; with several processes each must ask it the same."""
        if self._ranks.size == 1:
            return noisy.through(self.affine())
        # Of a prediction just made, the covariance of the top classes is computed while all processes are here.
        classes = self._top[1] if self._top is not None and self._top[0] is noisy else None
        self._top = None
        return ShardedLogits(self._shard(), noisy, self, classes)

    def _shard(self) -> Shard:
        return Shard(self._ranks, self.affine(), self.classes, self.num_classes)

    def _copied(self, noisy: NoisyFeatures) -> tuple[NoisyFeatures, tuple[Tensor, ...]]:
        """The same features and noise, with gradients that are summed over the processes; and all tensors that get a
        gradient, for a process without classes to answer for."""
        noise = noisy.noise
        tensors: dict[str, Any] = {"features": noisy.features, "temperature": noisy.temperature, "z": noisy.z}
        if noise is not None:
            tensors |= {"factors": noise.factors, "scale": noise.scale, "residual": noise.residual}
        tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        copies = dict(zip(tensors, copy_to_ranks(self._ranks, *tensors.values()), strict=True))
        if noise is not None:
            parts = {name: copies[name] for name in ("factors", "scale", "residual") if name in copies}
            noise = replace(noise, **parts)
        own = {name: copies[name] for name in ("features", "temperature", "z") if name in copies}
        affine = self.affine()
        parameters = (affine.weight,) if affine.bias is None else (affine.weight, affine.bias)
        return replace(noisy, noise=noise, **own), (*copies.values(), *parameters)

    def _compare(self, noisy: NoisyFeatures, targets: Targets) -> None:
        """At the start, see to it that the processes have the same batch, noise and replicated parameters."""
        if self._compared >= COMPARED:
            return
        self._compared += 1
        values, tolerances = fingerprint(noisy, targets)
        if bool((self._ranks.differ(values, "comparison of the batches") > tolerances).any()):
            raise ValueError(
                "the processes that share the classes have different features, targets or noise: give all of them the "
                "same batch, and start them from the same seed (torch.manual_seed) or checkpoint"
            )

    def _parameter(
        self, shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None
    ) -> nn.Parameter:
        if self._ranks.mesh is None:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as OnRows

        local = torch.empty(len(self.classes), *shape[1:], device=device, dtype=dtype)
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(
            local, self._ranks.mesh, [OnRows(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        return nn.Parameter(whole)

    def _local(self, parameter: Any) -> Tensor:
        """The part of a parameter that is here, as a plain tensor."""
        if self._ranks.mesh is None:
            return parameter
        if parameter.device_mesh.ndim != 1:
            raise RuntimeError(
                "the parameters are sharded over the data ranks as well, and not gathered now: call the head itself, "
                'or name its method first, as torch.distributed.fsdp.register_fsdp_forward_method(head, "predict") does'
            )
        return parameter.to_local()

    def _generator(self, device: torch.device, *streams: int) -> torch.Generator:
        state = np.random.SeedSequence((self.seed, *streams)).generate_state(1, np.uint64)
        return torch.Generator(device).manual_seed(int(state[0] >> np.uint64(1)))

    def _count(self) -> int:
        """`draws`, read from the device only after somebody else has written it."""
        if self._drawn is not None and self._drawn[:2] == (id(self.draws), self._written()):
            return self._drawn[2]
        return int(self.draws)

    def _written(self) -> int:
        """A number that changes when somebody writes `draws`."""
        return -1 if self.draws.is_inference() else self.draws._version

    def extra_repr(self) -> str:
        """The sizes as shown when the module is printed."""
        here = f", classes {self.classes.start} to {self.classes.stop - 1} here" if self._ranks.size > 1 else ""
        return f"{super().extra_repr()}, bias={self.bias is not None}{here}"


def _device_of(mesh: "DeviceMesh", device: torch.device | str | None) -> torch.device:
    """Where the parameters go: to the mesh's own device unless stated, and never to another kind."""
    kind = mesh.device_type
    if device is None:
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    device = torch.device(device)
    if device.type not in (kind, "meta"):
        raise ValueError(f"device={str(device)!r} is not of the mesh, which is of {kind!r} devices; leave device out")
    return device
