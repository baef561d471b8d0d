"""Rows of logits for a block of examples and a block of classes, and the way back from their gradients.

For every example the logits of all samples are linear in a few rows,

    factors-first:  logits = [1, z] @ [mean; lifted basis] / τ      P = Q + 1 rows
    samples-first:  logits = rows / τ                               P = S rows, mean + lifted draws

A block of rows is class-major, [k, n, P] for k classes and n examples: W times the rows, in the order in which W is
stored, and a block of classes is a slice of it. Measured, W @ rowsᵀ takes about half the time of rows @ Wᵀ on CPUs.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from hetxl.functional.distribution import Order
from hetxl.functional.engine.class_draws import ClassDraws
from hetxl.functional.engine.gradients import Gradients, gradient_products
from hetxl.functional.engine.inputs import Inputs
from hetxl.functional.noise import GaussianNoise


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in the precision of the products."""
    return values if values.dtype == dtype else values.to(dtype)


class _NoiseRows:
    """Rows in noise space, [n, P′, N]: the basis or the draws of a Gaussian, with their small graph kept."""

    def __init__(self, noise: GaussianNoise, count: int, z: Tensor | None, track: bool, columns: slice | None = None):
        self.leaves: dict[str, Tensor] = {}
        # Hooks of somebody else's (activation checkpointing's) must not see this graph, which lives within one pass.
        with torch.set_grad_enabled(track), torch.autograd.graph.saved_tensors_hooks(torch.detach, torch.detach):
            parts = {}
            for name in ("factors", "scale", "residual"):
                value = getattr(noise, name)
                if value is not None:
                    value = value.detach().requires_grad_(track)
                    self.leaves[name] = value
                parts[name] = value
            local = GaussianNoise(**parts, residual_kind=noise.residual_kind)
            if z is None:
                # Factors that all examples share, with nothing of their own beside them, are a basis without a batch.
                rows = local.basis().expand(count, -1, -1)
            else:
                rows = local.draw(z.to(next(iter(self.leaves.values())).dtype))
            self.graph = rows if columns is None else rows[..., columns]
        self.values = self.graph.detach()

    def logits(self, mean: Tensor, temperature: Tensor, memory: Tensor | None = None) -> Tensor:
        """(mean [k, n] + draws) / τ, [n, S, k], in memory of that size if given."""
        out = None if memory is None else memory.view(self.values.shape)
        return torch.add(self.values, mean.T.contiguous().unsqueeze(1), out=out).div_(temperature)

    def backward(self, gradient: Tensor) -> dict[str, Tensor]:
        """Gradients of the Gaussian's parts from that of the rows."""
        found = torch.autograd.grad(self.graph, list(self.leaves.values()), gradient.to(self.graph.dtype))
        return dict(zip(self.leaves, found, strict=True))


def _slice_noise(noise: GaussianNoise, examples: slice, classes: slice | None = None) -> GaussianNoise:
    """The Gaussians of some examples, for HET also of some classes."""
    few = noise.of_examples(examples)
    if classes is None:
        return few
    parts = [None if part is None else part[..., classes] for part in (few.factors, few.scale, few.residual)]
    return GaussianNoise(parts[0], parts[1], parts[2], noise.residual_kind)


class RowBlock(ABC):
    """Rows of logits for some examples; one subclass for each way noise reaches the logits.

    Args:
        inputs: of the evaluation.
        examples: which ones.
        order: "factors" or "samples".
        products: precision of the matrix products.
        gradients: where `backward` adds what it finds.

    Attributes:
        keeps: whether several blocks of classes are lifted before the first of them goes back: what that takes is kept.
    """

    def __init__(self, inputs: Inputs, examples: slice, order: Order, products: torch.dtype, gradients: Gradients):
        self.inputs = inputs
        self.examples = examples
        self.order: Order = order
        self.products = products
        self.gradient_products = gradient_products(products)
        self.gradients = gradients
        self.count = len(range(inputs.batch)[examples])
        self.keeps = False
        # With the rows' values and gradients at hand, τ's gradient is −⟨rows, their gradient⟩/τ: logits are rows / τ.
        self.scaling = torch.zeros((), dtype=inputs.wide, device=inputs.temperature.device)

    @abstractmethod
    def lift(self, classes: slice) -> Tensor:
        """The rows [k, n, P] of some classes, in wide precision."""

    def logits(self, classes: slice, memory: Tensor | None = None) -> Tensor:
        """Samples-first, the rows are the sampled logits: rows / τ, [k, n, S], in memory of that size if given."""
        rows = self.lift(classes)
        return torch.div(rows, self.inputs.temperature, out=None if memory is None else memory.view(rows.shape))

    @abstractmethod
    def backward(self, classes: slice, gradient: Tensor) -> None:
        """Take the gradient [k, n, P] of the rows last lifted for these classes."""

    def finish(self) -> None:
        """Carry what has been gathered over the classes back to the inputs."""
        if "temperature" in self.gradients:
            self.gradients.add("temperature", -self.scaling / self.inputs.temperature)

    def _scale(self, gradient: Tensor, rows: Tensor) -> None:
        """What rows and their gradient say of τ, where that is asked for: a pass over both."""
        if "temperature" in self.gradients:
            self.scaling += (gradient * rows).sum()

    def _times(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """gradient [m, k] @ weight [k, D], in wide precision."""
        dtype = self.gradient_products
        return (narrow(gradient, dtype) @ narrow(weight, dtype)).to(self.inputs.wide)

    def _noise_rows(self, classes: slice | None = None) -> _NoiseRows:
        noise, draws = self.inputs.noise, None
        assert noise is not None
        if self.order == "samples":
            assert self.inputs.z is not None
            draws = self.inputs.z[self.examples]
        track = self.gradients.any_noise
        if classes is None or noise.residual_kind == "rank1":
            return _NoiseRows(_slice_noise(noise, self.examples, classes), self.count, draws, track)
        if draws is None:  # a diagonal residual has a row for every class: all of them, at some columns
            return _NoiseRows(_slice_noise(noise, self.examples), self.count, None, track, classes)
        draws = torch.cat((draws[..., : noise.rank], draws[..., noise.rank :][..., classes]), dim=-1)
        return _NoiseRows(_slice_noise(noise, self.examples, classes), self.count, draws, track)

    def _noise_backward(self, rows: _NoiseRows, gradient: Tensor, classes: slice | None = None) -> None:
        """Add gradients of the noise's parts from that of rows [n, P′, N]."""
        if self.gradients.any_noise:
            self._noise_add(rows.backward(gradient), classes)

    def _noise_add(self, parts: dict[str, Tensor], classes: slice | None) -> None:
        """Add gradients of the noise's parts, for HET those of some classes."""
        for name, value in parts.items():
            if name not in self.gradients:
                continue
            target = self.gradients.of(name)
            if name != "factors" or target.dim() == 3:
                target = target[self.examples]
            if classes is not None and value.shape[-1] != target.shape[-1]:
                target = target[..., classes]
            target.add_(value)


class ClassifierRows(RowBlock):
    """DET and HET-XL: every row, of the mean and of the noise alike, goes through the classifier in one product."""

    def __init__(self, *args):
        super().__init__(*args)
        features = self.inputs.features
        assert features is not None
        features = features[self.examples].unsqueeze(1)  # [n, 1, D]
        self.noise_rows = None
        rows = features
        if self.inputs.lift == "classifier":
            self.noise_rows = self._noise_rows()
            noise = self.noise_rows.values
            rows = features + noise if self.order == "samples" else torch.cat((features, noise.to(features.dtype)), 1)
        self.rows = narrow(rows.detach(), self.products)  # [n, P, D]
        self.flat = self.rows.flatten(0, 1)
        self.flat_gradient: Tensor | None = None

    def lift(self, classes: slice) -> Tensor:
        """W rowsᵀ + b, [k, n, P]; the bias belongs to the mean."""
        return self._lift(classes, self.flat)

    def logits(self, classes: slice, memory: Tensor | None = None) -> Tensor:
        """τ divides the rows before they become K times as many."""
        temperature = self.inputs.temperature
        return self._lift(classes, narrow(self.flat / temperature, self.products), temperature, memory)

    def _lift(self, classes: slice, flat: Tensor, divide: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        weight, bias = self.inputs.weight, self.inputs.bias
        assert weight is not None
        out = None if memory is None else memory.view(-1, len(flat))
        lifted = self.gradients.product(narrow(weight[classes], self.products), flat.T, out)
        lifted = lifted.unflatten(1, self.rows.shape[:2])
        if bias is not None:
            mean = lifted if self.order == "samples" else lifted[:, :, :1]
            shift = bias[classes] if divide is None else bias[classes] / divide
            mean += shift[:, None, None]
        return lifted

    def backward(self, classes: slice, gradient: Tensor) -> None:
        """Gradients of W and b at once; those of the rows are summed over the classes."""
        flat = gradient.flatten(1)  # [k, n·P]
        weight, bias = self.inputs.weight, self.inputs.bias
        assert weight is not None
        self.gradients.add_product("weight", classes, flat, self.flat)
        if bias is not None and ("bias" in self.gradients or "temperature" in self.gradients):
            mean = gradient if self.order == "samples" else gradient[:, :, :1]
            found = mean.sum((1, 2))
            self.gradients.add("bias", found, classes)
            self.scaling += found @ bias[classes].to(found.dtype)
        if self.gradients.any_noise or "features" in self.gradients or "temperature" in self.gradients:
            found = self._times(flat.T, weight[classes])
            self.flat_gradient = found if self.flat_gradient is None else self.flat_gradient.add_(found)

    def finish(self) -> None:
        """Gradients of features, noise and τ."""
        if self.flat_gradient is not None:
            gradient = self.flat_gradient.unflatten(0, self.rows.shape[:2])  # [n, P, D]
            self._scale(gradient, self.rows)
            samples = self.order == "samples"
            self.gradients.add("features", gradient.sum(1) if samples else gradient[:, 0], self.examples)
            if self.noise_rows is not None:
                self._noise_backward(self.noise_rows, gradient if samples else gradient[:, 1:])
        super().finish()


class _Lifted(NamedTuple):
    """What the way back of a block of classes takes: mean logits [k, n], and HET's noise."""

    mean: Tensor
    noise: "_NoiseRows | ClassDraws | None" = None


class LiftedRows(RowBlock):
    """HET, HET-H and HET-XL with its own projection: mean logits from the classifier, plus noise lifted beside it."""

    def __init__(self, *args):
        super().__init__(*args)
        features = self.inputs.features
        self.features = None if features is None else narrow(features[self.examples].detach(), self.products)  # [n, D]
        self.features_gradient: Tensor | None = None
        # HET's noise space is the classes: its rows are made for a block of classes when that block comes.
        self.noise_rows = None if self.inputs.lift in ("identity", "none") else self._noise_rows()
        self.lifted: dict[int, _Lifted] = {}  # by the first class of a block
        self.gathered: Tensor | None = None
        if self.noise_rows is not None:
            self.noise_values = self.noise_rows.values
            if self.inputs.lift == "hash":
                self.noise_values = self.noise_values.permute(2, 0, 1).contiguous()  # [H, n, P′]: buckets are rows
            else:
                self.noise_values = narrow(self.noise_values, self.products).flatten(0, 1)  # [n·P′, M]

    def lift(self, classes: slice) -> Tensor:
        """mean + lifted noise, [k, n, P]."""
        noise = self._noise_rows(classes) if self.inputs.lift == "identity" else None
        mean = self._keep(classes, noise)
        if self.inputs.lift == "none":
            return mean.unsqueeze(-1).clone()  # rows are worked on in place
        lifted = self._lifted_noise(classes, noise)  # [k, n, P′]
        if self.order == "samples":
            return torch.add(lifted, mean.unsqueeze(-1), out=mean.new_empty(lifted.shape))
        return torch.cat((mean.unsqueeze(-1), lifted), dim=-1)

    def logits(self, classes: slice, memory: Tensor | None = None) -> Tensor:
        """HET's noise is made example by example, and stays so in memory: [n, S, k], seen as [k, n, S]."""
        if self.inputs.lift != "identity":
            return super().logits(classes, memory)
        noise = self.inputs.noise
        assert noise is not None
        if ClassDraws.fit(noise, self.inputs.wide):
            assert self.inputs.z is not None
            draws = ClassDraws(_slice_noise(noise, self.examples, classes), self.inputs.z[self.examples])
        else:
            draws = self._noise_rows(classes)
        mean = self._keep(classes, draws)
        return draws.logits(mean, self.inputs.temperature, memory).permute(2, 0, 1)

    def _keep(self, classes: slice, noise: "_NoiseRows | ClassDraws | None") -> Tensor:
        """The mean logits of some classes, [k, n]; with HET's noise they are kept until their gradient comes."""
        if not self.keeps:
            self.lifted.clear()
        mean = self._mean(classes)
        self.lifted[classes.start] = _Lifted(mean, noise)
        return mean

    def _mean(self, classes: slice) -> Tensor:
        if self.inputs.mean is not None:
            return self.inputs.mean[self.examples, classes].detach().T.to(self.inputs.wide)
        weight, bias = self.inputs.weight, self.inputs.bias
        assert weight is not None
        assert self.features is not None
        mean = (narrow(weight[classes], self.products) @ self.features.T).to(self.inputs.wide)
        return mean if bias is None else mean.add_(bias[classes, None])

    def _lifted_noise(self, classes: slice, noise: _NoiseRows | None) -> Tensor:
        if noise is not None:
            return noise.values.permute(2, 0, 1).to(self.inputs.wide)
        if self.inputs.lift == "hash":
            assert self.inputs.buckets is not None
            return self.noise_values.index_select(0, self.inputs.buckets[classes]).to(self.inputs.wide)
        assert self.inputs.projection is not None
        weight = narrow(self.inputs.projection[classes], self.products)
        return (weight @ self.noise_values.T).to(self.inputs.wide).unflatten(1, (self.count, -1))

    def backward(self, classes: slice, gradient: Tensor) -> None:
        """Gradients of the classifier and of what lifts; those of features and noise are summed over the classes."""
        last = self.lifted.pop(classes.start)
        if self.inputs.lift == "none":
            self._mean_backward(classes, last.mean, gradient[:, :, 0])
            return
        if isinstance(last.noise, ClassDraws):
            mean, parts = last.noise.backward(gradient.permute(1, 2, 0))
            self._mean_backward(classes, last.mean, mean)
            # ⟨draws, their gradient⟩ without a pass over either: draws are linear in v and d together.
            self._scale(parts["scale"], last.noise.scale)
            self._scale(parts["residual"], last.noise.residual)
            self._noise_add(parts, classes)
            return
        if self.order == "samples":
            mean, noise = gradient.sum(-1), gradient
        else:
            mean, noise = gradient[:, :, 0], gradient[:, :, 1:]
        self._mean_backward(classes, last.mean, mean)
        if last.noise is not None:
            found = noise.permute(1, 2, 0)
            self._scale(found, last.noise.values)
            self._noise_backward(last.noise, found, classes)
        elif self.inputs.lift == "hash":
            assert self.inputs.buckets is not None
            if self.gathered is None:
                self.gathered = torch.zeros_like(self.noise_values, dtype=self.inputs.wide)
            self.gathered.index_add_(0, self.inputs.buckets[classes], noise)
        else:
            assert self.inputs.projection is not None
            flat = noise.reshape(noise.shape[0], -1)  # [k, n·P′]
            self.gradients.add_product("projection", classes, flat, self.noise_values)
            found = self._times(flat.T, self.inputs.projection[classes])
            self.gathered = found if self.gathered is None else self.gathered.add_(found)

    def _mean_backward(self, classes: slice, mean: Tensor, gradient: Tensor) -> None:
        """From the mean logits [k, n] and their gradient."""
        self._scale(gradient, mean)
        if self.inputs.mean is not None:
            if "mean" in self.gradients:
                self.gradients.of("mean")[self.examples, classes].add_(gradient.T)
            return
        weight = self.inputs.weight
        assert weight is not None
        assert self.features is not None
        self.gradients.add_product("weight", classes, gradient, self.features)
        self.gradients.add("bias", gradient.sum(1), classes)
        if "features" in self.gradients:
            found = self._times(gradient.T, weight[classes])
            self.gradients.add("features", found, self.examples)

    def finish(self) -> None:
        """Gradients of the noise, where it is not HET's, and of τ."""
        if self.gathered is not None:
            self._scale(self.gathered, self.noise_values)
            assert self.noise_rows is not None
            if self.inputs.lift == "hash":
                self._noise_backward(self.noise_rows, self.gathered.permute(1, 2, 0))
            else:
                self._noise_backward(self.noise_rows, self.gathered.unflatten(0, (self.count, -1)))
        super().finish()


def row_block(inputs: Inputs, examples: slice, order: Order, products: torch.dtype, gradients: Gradients) -> RowBlock:
    """The rows of some examples."""
    through = inputs.lift == "classifier" or (inputs.lift == "none" and inputs.weight is not None)
    return (ClassifierRows if through else LiftedRows)(inputs, examples, order, products, gradients)
