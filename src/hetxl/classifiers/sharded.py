"""A classifier whose W is split over the processes of a mesh by class. Each process computes the logits of its own
classes; losses and predictions exchange only normalisers and the top classes of each process."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl._checks import integer_at_least
from hetxl.classifiers import collectives
from hetxl.classifiers.collectives import Ranks, Traffic
from hetxl.classifiers.sampled import check_few
from hetxl.functional import Affine, LabelLists, LogitDistribution, Summary, Targets, Weights, mc_log_normalisers
from hetxl.functional._torch import not_compiled, to_accumulation_dtype
from hetxl.functional.engine.blocked import Evaluation
from hetxl.functional.engine.inputs import Inputs, gather_inputs
from hetxl.functional.engine.plan import DEFAULT_BUDGET, plan_for
from hetxl.functional.engine.predict import joined
from hetxl.functional.engine.softmax import NEVER
from hetxl.functional.links import log_mean_exp, softmax_entropy
from hetxl.functional.targets import reduce_losses
from hetxl.nn.classifier import Classifier, NoisyFeatures
from hetxl.nn.prediction import TOP_CLASSES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BLOCK = 1024  # classes that are initialised together, so that initial values do not depend on the number of processes
COMPARED = 8  # number of initial losses in which the processes compare their batches
WEIGHT, BIAS, NOISE = range(3)  # streams of random numbers derived from a seed
PROBES = 8  # number of values of a tensor that processes compare
ROUNDING = 0.05
"""Maximum relative difference of these values if a network computed them, possibly in half precision."""

LARGEST = 1024  # maximum number of examples per exchange


class ShardedClassifier(Classifier):
    """Logits W φ + b, with the classes of W and b split over the processes of a device mesh.

    Every process of the mesh gets the same batch and computes the same loss. Processes exchange a few numbers per
    example and sample, never logits, so traffic does not depend on K (`docs/several_devices.md`). W and b are DTensors,
    `Shard(0)` on the mesh: each process has ⌈K / processes⌉ classes, see `classes`, and the last processes have the
    rest, possibly none. Gradients of W and b stay local; those of features, noise and τ are complete and equal on every
    process.

    It works with `DetHead`, and with `HetXLHead`, whose noise goes through W. Losses accept class ids (softmax) or
    labels in any form (sigmoid). Predictions support the methods "mc" and "deterministic", over all classes regardless
    of `tolerance`. All processes of the mesh must call every method except `affine` and `noise_generator`.

    Args:
        in_features: D
        num_classes: K
        mesh: device mesh with one dimension; for a mesh (data, classes) pass `mesh["classes"]`. None for a single
            process, which needs no process group.
        seed: seed of the noise and of the initial values, which do not depend on the number of processes.
        stream: number that separates the noise of replicas [default: the lowest rank in the mesh, which differs
            between the rows of a mesh (data, classes)].
        device: device of the parameters [default: that of the mesh].

    Attributes:
        draws: number of noise draws in training, part of the state dict, so that a resumed run draws the same noise.

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
        """Return the mesh of the processes that share the classes."""
        return self._ranks.mesh

    @property
    def traffic(self) -> Traffic:
        """Return the number of collectives and bytes of this process."""
        return self._ranks.traffic

    @property
    def classes(self) -> range:
        """Return the classes of this process."""
        width = -(-self.num_classes // self._ranks.size)
        start = min(self._ranks.rank * width, self.num_classes)
        return range(start, min(start + width, self.num_classes))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters again, like nn.Linear, with a separate seed for each block of classes."""
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
        """Compute logits [..., K] of features [..., D], gathered from all processes; only for few classes."""
        (features,) = collectives.copy_to_ranks(self._ranks, features)
        return collectives.gather_from_ranks(self._ranks, self.affine()(features), self.num_classes)

    @not_compiled
    def logits_of(self, features: Tensor, classes: Tensor) -> Tensor:
        """Compute logits [..., k] of classes [..., k], each on the process that has the class."""
        (features,) = collectives.copy_to_ranks(self._ranks, features)
        shard = self._shard()
        rows, here = shard.rows(classes)
        logits = (rows @ features.unsqueeze(-1)).squeeze(-1)
        if shard.affine.bias is not None and len(self.classes):
            bias = shard.affine.bias[local_ids(classes, self.classes).clamp(min=0)]
            logits = logits + torch.where(here, bias, 0.0)
        return collectives.sum_over_ranks(self._ranks, logits)

    def affine(self) -> Affine:
        """Return W and b of this process's classes."""
        return Affine(self._local(self.weight), None if self.bias is None else self._local(self.bias))

    def noise_generator(self) -> torch.Generator:
        """Return the noise generator, equal on every process of the mesh; each training loss draws new noise.

        In evaluation mode it starts from the same seed each time.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "ShardedClassifier cannot draw noise under activation checkpointing: the recomputation would draw "
                "other noise. Leave the head out of the checkpointed part, or pass the normals as noise="
            )
        stamp = (id(self.draws), self._written())
        # Read from the device only after `draws` was written from outside.
        count = self._drawn[2] if self._drawn is not None and self._drawn[:2] == stamp else int(self.draws)
        if self.training:
            self.draws += 1
            self._drawn = (id(self.draws), self._written(), count + 1)
        return self._generator(self.draws.device, NOISE, self.stream, count)

    @not_compiled
    def nll(self, noisy: NoisyFeatures, targets: Targets, reduction: str, weights: Weights) -> Tensor:
        """Return the negative log-likelihood of the targets, equal on every process: a scalar, or [...] for "none"."""
        if self._ranks.size == 1:
            return super().nll(noisy, targets, reduction, weights)
        check_few(noisy, targets, weights)
        self._compare(noisy, targets)
        noisy, tensors = self._copied(noisy)
        losses = self._label_losses if noisy.link == "sigmoid" else self._losses
        values = losses(noisy, tensors, targets, weights)
        factor, normaliser = weights.factors(targets, noisy.features.shape[:-1], noisy.link, values.detach())
        return reduce_losses(values, factor, normaliser, reduction)

    def _losses(self, noisy: NoisyFeatures, tensors: tuple[Tensor, ...], targets: Targets, weights: Weights) -> Tensor:
        """Return −log mean_s p_s[y], [...], from the label's logit and the normaliser of all others (softmax)."""
        assert targets.ids is not None
        own = local_ids(targets.ids, self.classes)
        if len(self.classes):
            affine, options = self.affine(), noisy.evaluation_options()
            others = mc_log_normalisers(noisy.through(affine), noisy.z, excluded=own, **options)  # [..., S]
            label = label_logits(affine, noisy, own)
        else:
            shape = torch.Size((*own.shape, 1 if noisy.z is None else noisy.z.shape[-2]))
            others, label = collectives.nothing(NEVER, shape, tensors), collectives.nothing(0.0, shape, tensors)
        others, label = collectives.log_sum_exp_over_ranks(self._ranks, others, label)
        # log p_s = label − log(exp(label) + exp(others)), also exact where p_s is nearly 1
        return -log_mean_exp(nn.functional.logsigmoid(label - others), dim=-1)

    def _label_losses(
        self, noisy: NoisyFeatures, tensors: tuple[Tensor, ...], targets: Targets, weights: Weights
    ) -> Tensor:
        """Return the summed binary cross-entropies of all labels, [...] (sigmoid)."""
        if len(self.classes):
            here = slice(self.classes.start, self.classes.stop)
            local = Weights(classes=None if weights.classes is None else weights.classes[here])
            labels = local_labels(targets, self.classes)
            losses = noisy.nll(noisy.through(self.affine()), labels, "none", local)
        else:
            losses = collectives.nothing(0.0, noisy.features.shape[:-1], tensors)
        return collectives.sum_over_ranks(self._ranks, losses)

    @not_compiled
    def log_probs(self, noisy: NoisyFeatures) -> Tensor:
        """Return averaged log-probabilities [..., K], gathered; only for few classes, without gradients on several
        processes.

        `head.loss(features, targets)` and `head.predict(features, top_k=5)` never gather all K classes.
        """
        if self._ranks.size == 1:
            return super().log_probs(noisy)
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "log-probabilities of classes on several processes have no gradients; pass targets to the head to get "
                "its loss, or call it under torch.no_grad() or in evaluation mode"
            )
        return gathered_log_probs(self._shard(), noisy)

    @not_compiled
    def predict(self, noisy: NoisyFeatures, method: str, top_k: int | None, tolerance: float) -> Summary:
        """Return averaged probabilities with entropies, equal on every process; without `top_k` all K are gathered."""
        if self._ranks.size == 1:
            return super().predict(noisy, method, top_k, tolerance)
        if method not in ("mc", "deterministic"):
            raise ValueError(
                f"method={method!r} needs all classes in one process; with classes on {self._ranks.size} use "
                '"mc" or "deterministic"'
            )
        summary = gathered_summary(self._shard(), noisy, method, top_k)
        indices = summary.indices
        if indices is None:
            indices = summary.log_probs.exp().topk(min(TOP_CLASSES, self.num_classes)).indices
        self._top = noisy, indices
        return summary

    @not_compiled
    def distribution(self, noisy: NoisyFeatures) -> LogitDistribution:
        """Return the Gaussian over the logits of all classes; all processes must request the same values from it."""
        if self._ranks.size == 1:
            return noisy.through(self.affine())
        # The covariance of a prediction's top classes is computed now, while all processes take part.
        classes = self._top[1] if self._top is not None and self._top[0] is noisy else None
        self._top = None
        return ShardedLogits(self._shard(), noisy, self, classes)

    def _shard(self) -> "Shard":
        return Shard(self._ranks, self.affine(), self.classes, self.num_classes)

    def _copied(self, noisy: NoisyFeatures) -> tuple[NoisyFeatures, tuple[Tensor, ...]]:
        """Return the features and noise with gradients that are summed over the processes, and all tensors that get a
        gradient, which a process without classes must contribute to."""
        noise = noisy.noise
        tensors: dict[str, Any] = {"features": noisy.features, "temperature": noisy.temperature, "z": noisy.z}
        tensors |= {} if noise is None else noise.parts()
        tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        copies = dict(zip(tensors, collectives.copy_to_ranks(self._ranks, *tensors.values()), strict=True))
        own = {name: copies.pop(name) for name in ("features", "temperature", "z") if name in copies}
        affine = self.affine()
        parameters = (affine.weight,) if affine.bias is None else (affine.weight, affine.bias)
        noise = noise and replace(noise, **copies)
        return replace(noisy, noise=noise, **own), (*own.values(), *copies.values(), *parameters)

    def _compare(self, noisy: NoisyFeatures, targets: Targets) -> None:
        """In the first losses, check that the processes have the same batch, noise and replicated parameters."""
        if self._compared >= COMPARED:
            return
        self._compared += 1
        values, tolerances = fingerprint(noisy, targets)
        if bool((self._ranks.differ(values, "comparison of the batches") > tolerances).any()):
            raise ValueError(
                "the processes that share the classes have different features, targets or noise; give all of them the "
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
        sizes = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
        return nn.Parameter(DTensor.from_local(local, self._ranks.mesh, [OnRows(0)], run_check=False, **sizes))

    def _local(self, parameter: Any) -> Tensor:
        """Return this process's part of a parameter as a plain tensor."""
        if self._ranks.mesh is None:
            return parameter
        if parameter.device_mesh.ndim != 1:
            raise RuntimeError(
                "the parameters are also sharded over the data ranks and not gathered now; call the head itself, or "
                'register the method with torch.distributed.fsdp.register_fsdp_forward_method(head, "predict")'
            )
        return parameter.to_local()

    def _generator(self, device: torch.device, *streams: int) -> torch.Generator:
        state = np.random.SeedSequence((self.seed, *streams)).generate_state(1, np.uint64)
        return torch.Generator(device).manual_seed(int(state[0] >> np.uint64(1)))

    def _written(self) -> int:
        """Return the version counter of `draws`."""
        return -1 if self.draws.is_inference() else self.draws._version

    def extra_repr(self) -> str:
        """Return the sizes shown when the module is printed."""
        here = f", classes {self.classes.start} to {self.classes.stop - 1} here" if self._ranks.size > 1 else ""
        return f"{super().extra_repr()}, bias={self.bias is not None}{here}"


def _device_of(mesh: "DeviceMesh", device: torch.device | str | None) -> torch.device:
    """Return the device of the parameters, which must be of the mesh's kind [default: the mesh's device]."""
    kind = mesh.device_type
    if device is None:
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    device = torch.device(device)
    if device.type not in (kind, "meta"):
        raise ValueError(
            f"device={str(device)!r} does not match the mesh, which has {kind!r} devices; leave device out"
        )
    return device


Columns = tuple[Tensor, Tensor | None, Tensor, Tensor, None]
"""Fields of a `Summary`: log p̄ and class ids, [n, k] or [n, K] and None, with entropy and expected entropy, [n]."""


@dataclass(frozen=True, eq=False)
class Shard:
    """The classes of this process, and the processes that have the others."""

    ranks: Ranks
    affine: Affine  # W and b of this process's classes
    classes: range  # their ids
    num_classes: int  # K, over all processes

    def rows(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of W for class ids [...], [..., D], zeros for classes of other processes; and a mask, [...]."""
        own = local_ids(classes, self.classes)
        here = own >= 0
        if not len(self.classes):
            return self.affine.weight.new_zeros(*classes.shape, self.affine.weight.shape[-1]), here
        return torch.where(here.unsqueeze(-1), self.affine.weight[own.clamp(min=0)], 0.0), here


@torch.no_grad()
def gathered_log_probs(shard: Shard, noisy: NoisyFeatures) -> Tensor:
    """Return averaged log-probabilities [..., K] of all processes' classes (sigmoid: logits of the mean)."""
    if noisy.link == "softmax":
        return gathered_summary(shard, noisy, "mc", None).log_probs
    if len(shard.classes):
        local = noisy.log_probs(noisy.through(shard.affine))
    else:
        local = _empty(noisy.features, *noisy.features.shape[:-1], 0)
    return collectives.gather_from_ranks(shard.ranks, local, shard.num_classes)


@torch.no_grad()
def gathered_summary(shard: Shard, noisy: NoisyFeatures, method: str, top_k: int | None) -> Summary:
    """Predict by "mc" or "deterministic" over the classes of all processes, all K or top_k; equal on each process."""
    if noisy.link == "sigmoid":
        return _sigmoid_summary(shard, noisy, method, top_k)
    distribution, z = noisy.through(shard.affine), noisy.z
    if method == "deterministic" or noisy.noise is None:
        distribution, z = distribution.without_noise(), None
    inputs = gather_inputs(distribution, z, noisy.temperature)
    budget = noisy.memory_budget or DEFAULT_BUDGET
    # Computed from numbers that are equal on all processes, so that all make the same exchanges.
    width = -(-shard.num_classes // shard.ranks.size)  # largest number of classes of a process
    size = max(1, min(inputs.batch, LARGEST, budget // (32 * width)))
    starts = range(0, max(inputs.batch, 1), size)
    parts = [_softmax_chunk(shard, inputs.of_examples(slice(start, start + size)), noisy, top_k) for start in starts]
    return joined(parts, noisy.features.shape[:-1])


def _softmax_chunk(shard: Shard, inputs: Inputs, noisy: NoisyFeatures, top_k: int | None) -> Columns:
    wide = inputs.temperature
    log_probs = wide.new_empty(inputs.batch, len(shard.classes))
    expected = wide.new_zeros(inputs.batch)
    normaliser = wide.new_full((inputs.batch, inputs.samples), NEVER)
    evaluation = None
    if len(shard.classes) and inputs.batch:
        plan = plan_for(inputs, "softmax", noisy.order, noisy.memory_budget)
        evaluation = Evaluation(inputs, plan, inputs.product_precision())
        normaliser = evaluation.log_normalisers(None)
    (normaliser,) = collectives.log_sum_exp_over_ranks(shard.ranks, normaliser)
    if evaluation is not None:
        evaluation.log_probs_given(normaliser, log_probs, expected)
    entropy, indices = softmax_entropy(log_probs), None
    if top_k is not None:
        log_probs, indices = log_probs.topk(min(top_k, len(shard.classes)))
    return _merged(shard, log_probs, indices, entropy, expected, top_k)


def _sigmoid_summary(shard: Shard, noisy: NoisyFeatures, method: str, top_k: int | None) -> Summary:
    """Predict each process's labels separately, since they are independent."""
    shape = noisy.features.shape[:-1]
    if len(shard.classes):
        few = None if top_k is None else min(top_k, len(shard.classes))
        local = noisy.predict(noisy.through(shard.affine), method, few, tolerance=0.0)
    else:
        none, zero = _empty(noisy.features, *shape, 0), _empty(noisy.features, *shape).zero_()
        local = Summary(none, none.long(), zero, zero, None)
    return Summary(*_merged(shard, local.log_probs, local.indices, local.entropy, local.expected_entropy, top_k))


def _merged(
    shard: Shard, values: Tensor, indices: Tensor | None, entropy: Tensor, expected: Tensor, top_k: int | None
) -> Columns:
    """Sum the entropies over all processes, and concatenate all log p̄ or select the k largest of [..., at most k]."""
    entropy, expected = shard.ranks.sum(torch.stack((entropy, expected)), "entropies").unbind()
    if top_k is None:
        return collectives.gather_from_ranks(shard.ranks, values, shard.num_classes), None, entropy, expected, None
    assert indices is not None
    more = top_k - values.shape[-1]
    values = F.pad(values, (0, more), value=-torch.inf)
    indices = F.pad(indices + shard.classes.start, (0, more), value=-1)
    all_values = shard.ranks.gather(values, "top classes").movedim(0, -2).flatten(-2)  # [..., ranks · k]
    all_indices = shard.ranks.gather(indices, "top classes").movedim(0, -2).flatten(-2)
    best, places = all_values.topk(top_k)
    return best, all_indices.gather(-1, places), entropy, expected, None


def _empty(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)


class ShardedLogits(LogitDistribution):
    """The Gaussian over the logits of all processes' classes.

    Every process must request the same values, because each value needs all processes. Only the covariance of the
    prediction's own classes, [..., k], is stored, so that a single process can print a prediction.
    """

    def __init__(self, shard: Shard, noisy: NoisyFeatures, classifier: Any, classes: Tensor | None):
        # Without a lift the distribution counts as opaque, and the classifier is called: correct, but slow.
        super().__init__(noisy.features, classifier, noisy.noise)
        self._shard = shard
        self._known: tuple[Tensor, Tensor] | None = None
        if classes is not None:
            with torch.no_grad():
                self._known = classes, self.covariance(classes)

    def covariance(self, classes: Tensor) -> Tensor:
        """Return the covariance of the logits of the given classes [..., k] of each example, [..., k, k]."""
        if self._known is not None and torch.equal(self._known[0], classes):
            return self._known[1]
        if self.noise is None:
            return self.features.new_zeros(*classes.shape, classes.shape[-1])
        rows, _ = self._shard.rows(classes)  # [..., k, D], zeros for classes of other processes
        factors = to_accumulation_dtype(self.noise.project(rows))  # [..., k, Q]
        factors = self._shard.ranks.sum(factors.contiguous(), "rows of the top classes")
        return factors @ factors.mT

    def _lifted(self, noise: Tensor) -> Tensor:
        local = F.linear(noise, self._shard.affine.weight)
        return collectives.gather_from_ranks(self._shard.ranks, local, self._shard.num_classes)


def local_ids(ids: Tensor, classes: range) -> Tensor:
    """Return class ids relative to the start of a range, −1 for ids outside of it."""
    inside = (ids >= classes.start) & (ids < classes.stop)
    return torch.where(inside, ids - classes.start, -1)


def local_labels(targets: Targets, classes: range) -> Targets:
    """Return the labels in a range of classes (sigmoid); ignored examples have none."""
    if targets.dense is not None:
        return Targets(dense=targets.dense[..., classes.start : classes.stop])
    if targets.ids is not None:
        ids = targets.ids.flatten()
        everyone = torch.arange(len(ids), device=ids.device)
        lists = LabelLists(everyone, ids, None, len(ids))
    else:
        assert targets.lists is not None
        lists = targets.lists
    inside = (lists.classes >= classes.start) & (lists.classes < classes.stop)
    values = None if lists.values is None else lists.values[inside]
    local = LabelLists(lists.examples[inside], lists.classes[inside] - classes.start, values, lists.batch)
    return Targets(lists=local)


def label_logits(affine: Affine, noisy: NoisyFeatures, ids: Tensor) -> Tensor:
    """Return sampled logits / τ of one class per example, [..., S], in at least float32; 0 for a negative id [...]."""
    known = ids.clamp(min=0)
    # Sparse, so that the gradient of a few rows is added to that of all rows without a dense copy.
    rows = F.embedding(known, affine.weight, sparse=True)  # [..., D]
    bias = None if affine.bias is None else affine.bias[known]
    return torch.where((ids < 0).unsqueeze(-1), 0.0, noisy.logits_at(rows, bias) / noisy.temperature)


def fingerprint(noisy: NoisyFeatures, targets: Targets) -> tuple[Tensor, Tensor]:
    """Return a few numbers [n] of a batch in float64, and how far each may differ [n] between processes.

    Labels and normals must be bit-identical. Outputs of a network may differ by rounding.
    """
    features, noise = noisy.features.detach(), noisy.noise
    exact = [features.new_tensor([features.numel()], dtype=torch.float64)]
    if targets.ids is not None:
        ids = targets.ids.flatten().double()
        exact.append((ids * torch.arange(1, len(ids) + 1, device=ids.device)).sum().view(1))
    elif targets.lists is not None:
        exact.append(((targets.lists.examples + 1) * (targets.lists.classes + 1)).sum().double().view(1))
    if noisy.z is not None:
        exact.append(_probe(noisy.z.detach()))
    computed = [features, torch.as_tensor(noisy.temperature, device=features.device).detach()]
    if targets.dense is not None:
        computed.append(targets.dense)
    computed += [] if noise is None else [values.detach() for values in noise.parts().values()]
    near = [_probe(values) for values in computed]
    sizes = [values.square().mean().sqrt().expand(len(values)) for values in near]
    values = torch.cat(exact + near)
    return values, torch.cat([torch.zeros_like(part) for part in exact] + [ROUNDING * size for size in sizes])


def _probe(values: Tensor) -> Tensor:
    """Return a fixed number of the values, in float64."""
    values = values.flatten()
    if not len(values):
        return values.new_zeros(PROBES, dtype=torch.float64)
    return values[torch.linspace(0, len(values) - 1, PROBES, device=values.device).long()].double()
