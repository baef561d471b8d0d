"""Rows of logits for a block of examples and a block of classes, and their backward pass.

For each example, the logits of all samples are linear in a few rows,

    factors-first:  logits = [1, z] @ [mean; lifted basis] / τ      P = Q + 1 rows
    samples-first:  logits = rows / τ                               P = S rows, mean + lifted draws

A block of rows is class-major, [k, n, P] for k classes and n examples: W times the rows, in the order in which W is
stored, and a block of classes is a slice of W. On CPUs, W @ rowsᵀ takes about half the time of rows @ Wᵀ (measured).
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from hetxl.functional.distribution import Order
from hetxl.functional.engine.inputs import GivenMean, Inputs, LinearMean, NoiseInput
from hetxl.functional.noise import GaussianNoise


class Workspace:
    """Scratch memory of one evaluation, reused by every block, since mapping new memory takes time."""

    def __init__(self, like: Tensor):
        self.like = like  # has the precision and device of the sums
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, size: int) -> Tensor:
        """Return flat memory of `size` elements; the next call with the same name reuses it."""
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory.pop(name, None)  # free it first
            self._memory[name] = self.like.new_empty(size)
        return self._memory[name][:size]

    def product(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute left [k, D] @ right [D, m] in the precision of the sums, in `out` or in the workspace."""
        if left.dtype != self.like.dtype:
            narrow_product = left @ right
            return narrow_product.to(self.like.dtype) if out is None else out.copy_(narrow_product)
        if out is None:
            out = self.take("product", left.shape[0] * right.shape[1]).view(left.shape[0], right.shape[1])
        return torch.mm(left, right, out=out)


class Gradients:
    """Sums of gradients over blocks, in the precision of the sums, for the inputs that need one."""

    def __init__(self, tensors: dict[str, Tensor], needed: frozenset[str], wide: torch.dtype):
        self.tensors, self.needed, self.wide = tensors, needed, wide
        self._sums: dict[str, Tensor] = {}
        self._written: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.needed

    @property
    def any_noise(self) -> bool:
        """Return whether any input of the noise needs a gradient."""
        return not self.needed.isdisjoint(("factors", "scale", "residual"))

    def of(self, name: str) -> Tensor:
        """Return the running sum for one input, in its shape and wide precision; initially zeros."""
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(self.tensors[name], dtype=self.wide)
        sums = self._sums[name]
        written = self._written.pop(name, None)
        if written is not None:  # `add_product` writes the first time and adds later
            sums[written:] = 0
            self._written[name] = len(sums)
        return sums

    def add(self, name: str, value: Tensor, index: slice | None = None) -> None:
        """Add to the sum of an input, or to a slice of its first dimension."""
        if name in self.needed:
            target = self.of(name)
            (target if index is None else target[index]).add_(value)

    def add_product(self, name: str, classes: slice, left: Tensor, right: Tensor) -> None:
        """Add left [k, m] @ right [m, D] to the rows of a weight that belong to `classes`."""
        if name not in self.needed:
            return
        if name not in self._sums:
            self._sums[name] = torch.empty_like(self.tensors[name], dtype=self.wide)
            self._written[name] = 0
        target, right = self._sums[name][classes], right.to(gradient_products(right.dtype))
        # The first block of examples writes and the others add, which saves a pass over the weight to clear it.
        first = classes.start >= self._written[name]
        self._written[name] = max(self._written[name], classes.stop)
        if left.dtype == right.dtype == target.dtype:
            torch.mm(left, right, out=target) if first else target.addmm_(left, right)
        else:
            product = left.to(right.dtype) @ right
            target.copy_(product) if first else target.add_(product)

    def finished(self, scale: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return one gradient for each input, in its precision; None where none is needed.

        The scale is applied before the conversion: losses in float16 are scaled to keep small gradients.
        """
        # `loss.backward()` scales by 1. On a CPU this check costs nothing and saves a pass over the weight.
        if scale is not None and scale.device.type == "cpu" and scale.dim() == 0 and float(scale) == 1:
            scale = None
        if scale is not None:
            for name in self.needed:
                self.of(name).mul_(scale.to(self.wide))
        tensors = self.tensors.items()
        return tuple(self.of(name).to(tensor.dtype) if name in self.needed else None for name, tensor in tensors)


def gradient_products(products: torch.dtype) -> torch.dtype:
    """Return the precision of products with gradients: float16 would lose the small ones, before any loss scale."""
    return torch.float32 if products == torch.float16 else products


class NoiseRows:
    """Rows in noise space [n, P′, N], at all or some columns: draws of a Gaussian for z [n, S, Q], its basis for None.

        draws:  z[:R] @ factors · scale + z[R:] · residual            [n, S, N]
        basis:  factors · scale, and below it residual                [n, Q, N]

    Their gradients are explicit, since autograd does not record inside a torch operator.
    """

    def __init__(self, noise: GaussianNoise, count: int, z: Tensor | None, columns: slice | None = None):
        self.noise, self.count, self.columns = noise.mapped(torch.detach), count, columns
        self.z = None if z is None else z.to(noise.dtype)
        # Shared factors without a scale or residual give a basis without a batch dimension.
        rows = self.noise.basis().expand(count, -1, -1) if self.z is None else self.noise.draw(self.z)
        self.values = rows if columns is None else rows[..., columns]

    def logits(self, mean: Tensor, temperature: Tensor, memory: Tensor | None = None) -> Tensor:
        """Compute (mean [k, n] + draws) / τ, [n, S, k], in `memory` of that size if passed."""
        out = None if memory is None else memory.view(self.values.shape)
        return torch.add(self.values, mean.T.contiguous().unsqueeze(1), out=out).div_(temperature)

    def backward(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return gradients of the Gaussian's parts, given the gradient of the rows."""
        noise, gradients = self.noise, {}
        gradient = gradient.to(noise.dtype)
        if self.columns is not None:
            whole = gradient.new_zeros(*gradient.shape[:-1], noise.features)
            whole[..., self.columns] = gradient
            gradient = whole
        if noise.factors is not None:
            mixed = noise.factors if self.z is None else self.z[..., : noise.rank] @ noise.factors  # [n, S or R, N]
            of_mixed = gradient[:, : noise.rank] if self.z is None else gradient
            if noise.scale is not None:
                gradients["scale"] = (of_mixed * mixed).sum(1)
                of_mixed = of_mixed * noise.scale.unsqueeze(-2)
            gradients["factors"] = self._of_factors(of_mixed, shared=noise.factors.dim() == 2)
        if noise.residual is not None:
            gradients["residual"] = self._of_residual(gradient)
        return gradients

    def _of_factors(self, gradient: Tensor, shared: bool) -> Tensor:
        """Return the gradient [R, N] or [n, R, N] of the factors, given that of their mixtures."""
        if self.z is None:
            return gradient.sum(0) if shared else gradient
        z = self.z[..., : self.noise.rank]
        return z.flatten(0, 1).T @ gradient.flatten(0, 1) if shared else z.mT @ gradient

    def _of_residual(self, gradient: Tensor) -> Tensor:
        """Return the gradient [n, N] of the residual."""
        if self.z is not None:
            return (self.z[..., self.noise.rank :] * gradient).sum(1)
        own = gradient[:, self.noise.rank :]
        return own.squeeze(1) if self.noise.residual_kind == "rank1" else own.diagonal(dim1=-2, dim2=-1)


def _three_parts(noise: GaussianNoise, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return shared factors [R, N], scale [n, N] and a rank-1 residual [n, N], converted to a dtype; None for other
    noise."""
    factors, scale, residual = noise.factors, noise.scale, noise.residual
    if noise.residual_kind != "rank1" or factors is None or scale is None or residual is None:
        return None
    if factors.dim() != 2 or any(part.dtype != dtype for part in (factors, scale, residual)):
        return None
    return factors.detach(), scale.detach(), residual.detach()


class ClassBasis:
    """HET's basis over some classes, factors-first, written directly into the rows [k, n, P].

        torch.cat((mean, noise.basis()), dim=1)

    HET's basis is Q times as large as the mean logits, so each further pass over it costs as much as computing it.
    """

    def __init__(self, factors: Tensor, scale: Tensor, residual: Tensor):
        self.factors, self.scale, self.residual = factors, scale, residual

    @staticmethod
    def of(noise: GaussianNoise, dtype: torch.dtype) -> "ClassBasis | None":
        """Return the basis of such noise in the precision of the sums; None for other noise."""
        parts = _three_parts(noise, dtype)
        return None if parts is None else ClassBasis(*parts)

    def rows(self, mean: Tensor, workspace: Workspace) -> Tensor:
        """Return the rows [k, n, P] of mean logits [k, n] and of the noise."""
        shape = *mean.shape, len(self.factors) + 2
        rows = workspace.take("rows", math.prod(shape)).view(shape)
        rows[..., 0], rows[..., -1] = mean, self.residual.T
        torch.mul(self.factors.T.unsqueeze(1), self.scale.T.unsqueeze(-1), out=rows[..., 1:-1])
        return rows

    def backward(self, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return gradients of the mean [k, n] and the Gaussian's parts, given that of the rows [k, n, P]."""
        of_basis = gradient[..., 1:-1]  # [k, n, R]
        scale = torch.bmm(of_basis, self.factors.T.unsqueeze(-1)).squeeze(-1).T  # [n, k]
        factors = torch.bmm(self.scale.T.unsqueeze(1), of_basis).squeeze(1).T  # [R, k]
        return gradient[..., 0], {"factors": factors, "scale": scale, "residual": gradient[..., -1].T}


class ClassDraws:
    """HET's draws over some classes, samples-first, in as few passes over [n, S, k] as possible.

        noise.draw(z)

    HET's noise space is the classes, so its draws are as large as the logits, and their cost is the number of passes
    over memory. With shared factors J [R, k], and deviations v(x) and d(x) [n, k],

        logits = (mean + v · (z J) + z_Q d) / τ

    needs a product and two passes. In the backward pass, with G the gradient [n, S, k], one product gives Σ_s G for the
    mean and Σ_s z_Q G for d, another gives zᵀ (G · v) for J, and one pass gives Σ_s G · (z J) for v.
    """

    def __init__(self, factors: Tensor, scale: Tensor, residual: Tensor, z: Tensor):
        self.scale, self.residual = scale, residual
        z, rank = z.to(scale.dtype), factors.shape[0]
        self.shared, self.own = z[..., :rank].flatten(0, 1), z[..., rank:]  # [n·S, R], [n, S, 1]
        self.mixed = (self.shared @ factors).unflatten(0, z.shape[:2])  # [n, S, k]

    @staticmethod
    def of(noise: GaussianNoise, z: Tensor, dtype: torch.dtype) -> "ClassDraws | None":
        """Return the draws of such noise in the precision of the sums; None for other noise."""
        parts = _three_parts(noise, dtype)
        return None if parts is None else ClassDraws(*parts, z)

    def logits(self, mean: Tensor, temperature: Tensor, memory: Tensor | None = None) -> Tensor:
        """Compute (mean [k, n] + draws) / τ, [n, S, k], in `memory` of that size if passed."""
        mean, scale, residual = (
            (part / temperature).unsqueeze(1) for part in (mean.T.contiguous(), self.scale, self.residual)
        )  # [n, 1, k]
        out = None if memory is None else memory.view(self.mixed.shape)
        return torch.addcmul(mean, self.mixed, scale, out=out).addcmul_(self.own, residual)

    def backward(self, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return gradients of the mean [k, n] and the Gaussian's parts, given that of the draws [n, S, k].

        Overwrites the gradient and the draws.
        """
        weights = torch.cat((torch.ones_like(self.own), self.own), dim=-1).mT  # [n, 2, S]
        mean, residual = torch.bmm(weights, gradient).unbind(1)
        scale = self.mixed.mul_(gradient).sum(1)
        factors = self.shared.T @ gradient.mul_(self.scale.unsqueeze(1)).flatten(0, 1)
        return mean.T, {"factors": factors, "scale": scale, "residual": residual}


def _of_classes(noise: GaussianNoise, classes: slice) -> GaussianNoise:
    """Return HET's noise for some classes."""
    return noise.mapped(lambda part: part[..., classes])


class Context(NamedTuple):
    """The state shared by all blocks of an evaluation."""

    inputs: Inputs
    order: Order
    products: torch.dtype  # dtype of the matrix products
    gradients: Gradients  # sums that blocks add to
    workspace: Workspace

    @staticmethod
    def of(inputs: Inputs, order: Order, products: torch.dtype, needed: frozenset[str] = frozenset()) -> "Context":
        """Create the context of a new evaluation, with gradients for the inputs named by `needed`."""
        like = torch.empty(0, dtype=inputs.wide, device=inputs.temperature.device)
        return Context(inputs, order, products, Gradients(inputs.tensors(), needed, inputs.wide), Workspace(like))


class RowBlock(ABC):
    """Rows of logits for some examples, with one subclass for each kind of lift."""

    def __init__(self, context: Context, examples: slice):
        self.inputs, self.order, self.products, self.gradients, self.workspace = context
        self.examples, self.count = examples, len(range(self.inputs.batch)[examples])
        # Whether several blocks of classes are lifted before the first backward call, which needs their values.
        self.keeps = False
        # Logits are rows / τ, so τ's gradient is −⟨rows, their gradient⟩ / τ.
        self.scaling = self.workspace.like.new_zeros(())

    @abstractmethod
    def lift(self, classes: slice) -> Tensor:
        """Return the rows [k, n, P] of some classes, in wide precision."""

    def logits(self, classes: slice, memory: Tensor | None = None) -> Tensor:
        """Compute sampled logits, samples-first: rows / τ, [k, n, S], in `memory` of that size if passed."""
        rows = self.lift(classes)
        return torch.div(rows, self.inputs.temperature, out=None if memory is None else memory.view(rows.shape))

    @abstractmethod
    def backward(self, classes: slice, gradient: Tensor) -> None:
        """Backpropagate the gradient [k, n, P] of the rows last lifted for these classes."""

    def finish(self) -> None:
        """Backpropagate the sums over the classes to the inputs."""
        if "temperature" in self.gradients:
            self.gradients.add("temperature", -self.scaling / self.inputs.temperature)

    def _scale(self, gradient: Tensor, rows: Tensor) -> None:
        """Add the contribution of rows and their gradient to τ's gradient, if τ is learned; one pass over both."""
        if "temperature" in self.gradients:
            self.scaling += (gradient * rows).sum()

    def _times(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Compute gradient [m, k] @ weight [k, D] in wide precision."""
        dtype = gradient_products(self.products)
        return (gradient.to(dtype) @ weight.to(dtype)).to(self.inputs.wide)

    def _noise_rows(self, noise: NoiseInput, classes: slice | None = None) -> NoiseRows:
        """Return the noise rows of these examples; for HET those of some classes."""
        gaussian, rank = noise.gaussian.of_examples(self.examples), noise.gaussian.rank
        draws = noise.normals[self.examples] if self.order == "samples" else None
        if classes is None:
            return NoiseRows(gaussian, self.count, draws)
        if gaussian.residual_kind == "diagonal":
            if draws is None:  # a diagonal residual has one row for each class, so use all rows at these columns
                return NoiseRows(gaussian, self.count, None, classes)
            draws = torch.cat((draws[..., :rank], draws[..., rank:][..., classes]), dim=-1)
        return NoiseRows(_of_classes(gaussian, classes), self.count, draws)

    def _noise_backward(self, rows: NoiseRows, gradient: Tensor, classes: slice | None = None) -> None:
        """Add gradients of the noise's parts, given that of the rows [n, P′, N]."""
        if self.gradients.any_noise:
            self._noise_add(rows.backward(gradient), classes)

    def _noise_add(self, parts: dict[str, Tensor], classes: slice | None) -> None:
        """Add gradients of the noise's parts; for HET those of some classes."""
        for name in parts.keys() & self.gradients.needed:
            value, target = parts[name], self.gradients.of(name)
            if name != "factors" or target.dim() == 3:
                target = target[self.examples]
            if classes is not None and value.shape[-1] != target.shape[-1]:
                target = target[..., classes]
            target.add_(value)


class ClassifierRows(RowBlock):
    """DET and HET-XL: the rows of mean and noise go through the classifier in one product."""

    def __init__(self, mean: LinearMean, noise: NoiseInput | None, context: Context, examples: slice):
        super().__init__(context, examples)
        self.mean = mean
        features = rows = mean.features[self.examples].unsqueeze(1)  # [n, 1, D]
        self.noise_rows = None
        if noise is not None:
            self.noise_rows = self._noise_rows(noise)
            values = self.noise_rows.values
            rows = features + values if self.order == "samples" else torch.cat((features, values.to(features.dtype)), 1)
        self.rows = rows.detach().to(self.products)  # [n, P, D]
        self.flat = self.rows.flatten(0, 1)
        self.flat_gradient: Tensor | None = None

    def lift(self, classes: slice) -> Tensor:
        """Return W rowsᵀ + b, [k, n, P]; the bias belongs to the mean."""
        return self._lift(classes, self.flat)

    def logits(self, classes: slice, memory: Tensor | None = None) -> Tensor:
        """Divide the rows by τ before the lift, where there are fewer elements."""
        temperature = self.inputs.temperature
        return self._lift(classes, (self.flat / temperature).to(self.products), temperature, memory)

    def _lift(self, classes: slice, flat: Tensor, divide: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        out = None if memory is None else memory.view(-1, len(flat))
        lifted = self.workspace.product(self.mean.weight[classes].to(self.products), flat.T, out)
        lifted = lifted.unflatten(1, self.rows.shape[:2])
        if self.mean.bias is not None:
            bias = self.mean.bias[classes] if divide is None else self.mean.bias[classes] / divide
            (lifted if self.order == "samples" else lifted[:, :, :1]).add_(bias[:, None, None])
        return lifted

    def backward(self, classes: slice, gradient: Tensor) -> None:
        """Add gradients of W and b; sum those of the rows over the classes."""
        flat, bias = gradient.flatten(1), self.mean.bias  # [k, n·P]
        self.gradients.add_product("weight", classes, flat, self.flat)
        if bias is not None and ("bias" in self.gradients or "temperature" in self.gradients):
            mean = gradient if self.order == "samples" else gradient[:, :, :1]
            of_bias = mean.sum((1, 2))
            self.gradients.add("bias", of_bias, classes)
            self.scaling += of_bias @ bias[classes].to(of_bias.dtype)
        if self.gradients.any_noise or "features" in self.gradients or "temperature" in self.gradients:
            of_rows = self._times(flat.T, self.mean.weight[classes])
            self.flat_gradient = of_rows if self.flat_gradient is None else self.flat_gradient.add_(of_rows)

    def finish(self) -> None:
        """Add gradients of features, noise and τ."""
        if self.flat_gradient is not None:
            gradient = self.flat_gradient.unflatten(0, self.rows.shape[:2])  # [n, P, D]
            self._scale(gradient, self.rows)
            samples = self.order == "samples"
            self.gradients.add("features", gradient.sum(1) if samples else gradient[:, 0], self.examples)
            if self.noise_rows is not None:
                self._noise_backward(self.noise_rows, gradient if samples else gradient[:, 1:])
        super().finish()


class MeanRows(RowBlock):
    """Mean logits alone; base of the classes whose noise bypasses the classifier."""

    features: Tensor  # [n, D], of a linear classifier

    def __init__(self, context: Context, examples: slice):
        super().__init__(context, examples)
        self.mean = self.inputs.mean
        if isinstance(self.mean, LinearMean):
            self.features = self.mean.features[self.examples].detach().to(self.products)
        self.means: dict[int, Tensor] = {}  # [k, n] by the first class of a block, kept for its backward call

    def lift(self, classes: slice) -> Tensor:
        """Return the mean logits, [k, n, 1]."""
        return self._keep_mean(classes).unsqueeze(-1).clone()  # rows are modified in place

    def backward(self, classes: slice, gradient: Tensor) -> None:
        """Add gradients of the mean logits."""
        self._mean_backward(classes, gradient[:, :, 0])

    def _keep_mean(self, classes: slice) -> Tensor:
        """Return the mean logits of some classes, [k, n], and keep them."""
        if not self.keeps:
            self.means.clear()
        if isinstance(self.mean, GivenMean):
            mean = self.mean.mean[self.examples, classes].detach().T.to(self.inputs.wide)
        else:
            mean = (self.mean.weight[classes].to(self.products) @ self.features.T).to(self.inputs.wide)
            if self.mean.bias is not None:
                mean.add_(self.mean.bias[classes, None])
        self.means[classes.start] = mean
        return mean

    def _with_mean(self, mean: Tensor, lifted: Tensor) -> Tensor:
        """Return the rows [k, n, P] of mean logits [k, n] and lifted noise [k, n, P′]."""
        if self.order == "samples":
            return torch.add(lifted, mean.unsqueeze(-1), out=mean.new_empty(lifted.shape))
        return torch.cat((mean.unsqueeze(-1), lifted), dim=-1)

    def _split(self, classes: slice, gradient: Tensor) -> Tensor:
        """Backpropagate the mean's part of a gradient [k, n, P] and return the noise's part, [k, n, P′]."""
        if self.order == "samples":
            self._mean_backward(classes, gradient.sum(-1))
            return gradient
        self._mean_backward(classes, gradient[:, :, 0])
        return gradient[:, :, 1:]

    def _mean_backward(self, classes: slice, gradient: Tensor) -> None:
        """Add gradients of the classifier, given that of the mean logits, [k, n]."""
        self._scale(gradient, self.means.pop(classes.start))
        if isinstance(self.mean, GivenMean):
            if "mean" in self.gradients:
                self.gradients.of("mean")[self.examples, classes].add_(gradient.T)
            return
        self.gradients.add_product("weight", classes, gradient, self.features)
        self.gradients.add("bias", gradient.sum(1), classes)
        if "features" in self.gradients:
            self.gradients.add("features", self._times(gradient.T, self.mean.weight[classes]), self.examples)


class ClassNoiseRows(MeanRows):
    """HET: its noise space is the classes, so the rows of a block of classes are computed for that block alone."""

    def __init__(self, noise: NoiseInput, context: Context, examples: slice):
        super().__init__(context, examples)
        self.noise = noise
        self.drawn: dict[int, NoiseRows | ClassBasis | ClassDraws] = {}  # by the first class of a block

    def lift(self, classes: slice) -> Tensor:
        """Return mean + noise, [k, n, P]; the next call may reuse the memory."""
        if self.order == "factors":
            basis = ClassBasis.of(
                _of_classes(self.noise.gaussian.of_examples(self.examples), classes), self.inputs.wide
            )
            if basis is not None:
                return basis.rows(self._keep(classes, basis), self.workspace)
        noise = self._noise_rows(self.noise, classes)
        mean = self._keep(classes, noise)
        return self._with_mean(mean, noise.values.permute(2, 0, 1).to(self.inputs.wide))

    def logits(self, classes: slice, memory: Tensor | None = None) -> Tensor:
        """Return the logits as a view [k, n, S] of [n, S, k], since noise is drawn example by example."""
        gaussian = _of_classes(self.noise.gaussian.of_examples(self.examples), classes)
        draws = ClassDraws.of(gaussian, self.noise.normals[self.examples], self.inputs.wide)
        draws = draws or self._noise_rows(self.noise, classes)
        mean = self._keep(classes, draws)
        return draws.logits(mean, self.inputs.temperature, memory).permute(2, 0, 1)

    def _keep(self, classes: slice, noise: NoiseRows | ClassBasis | ClassDraws) -> Tensor:
        if not self.keeps:
            self.drawn.clear()
        self.drawn[classes.start] = noise
        return self._keep_mean(classes)

    def backward(self, classes: slice, gradient: Tensor) -> None:
        """Add gradients of the classifier and of the noise."""
        draws = self.drawn.pop(classes.start)
        if not isinstance(draws, NoiseRows):
            mean, parts = draws.backward(gradient if isinstance(draws, ClassBasis) else gradient.permute(1, 2, 0))
            self._mean_backward(classes, mean)
            # ⟨rows, their gradient⟩ without a pass over either, since the noise is jointly linear in v and d.
            self._scale(parts["scale"], draws.scale)
            self._scale(parts["residual"], draws.residual)
            self._noise_add(parts, classes)
            return
        of_noise = self._split(classes, gradient).permute(1, 2, 0)
        self._scale(of_noise, draws.values)
        self._noise_backward(draws, of_noise, classes)


class HashRows(MeanRows):
    """HET-H: each class reads the rows of its bucket."""

    def __init__(self, noise: NoiseInput, context: Context, examples: slice):
        super().__init__(context, examples)
        self.buckets, self.noise_rows = noise.lift.buckets, self._noise_rows(noise)
        self.values = self.noise_rows.values.permute(2, 0, 1).contiguous()  # [H, n, P′]: buckets are rows
        self.gathered: Tensor | None = None

    def lift(self, classes: slice) -> Tensor:
        """Return mean + noise of the buckets, [k, n, P]."""
        lifted = self.values.index_select(0, self.buckets[classes]).to(self.inputs.wide)
        return self._with_mean(self._keep_mean(classes), lifted)

    def backward(self, classes: slice, gradient: Tensor) -> None:
        """Add gradients of the classifier; sum those of the buckets over the classes."""
        of_noise = self._split(classes, gradient)
        if self.gathered is None:
            self.gathered = torch.zeros_like(self.values, dtype=self.inputs.wide)
        self.gathered.index_add_(0, self.buckets[classes], of_noise)

    def finish(self) -> None:
        """Add gradients of the noise and of τ."""
        if self.gathered is not None:
            self._scale(self.gathered, self.values)
            self._noise_backward(self.noise_rows, self.gathered.permute(1, 2, 0))
        super().finish()


class ProjectionRows(MeanRows):
    """HET-XL with its own projection: noise goes through W′, the features through W."""

    def __init__(self, noise: NoiseInput, context: Context, examples: slice):
        super().__init__(context, examples)
        self.projection, self.noise_rows = noise.lift.weight, self._noise_rows(noise)
        self.values = self.noise_rows.values.to(self.products).flatten(0, 1)  # [n·P′, M]
        self.gathered: Tensor | None = None

    def lift(self, classes: slice) -> Tensor:
        """Return mean + W′ noise, [k, n, P]."""
        mean = self._keep_mean(classes)
        lifted = (self.projection[classes].to(self.products) @ self.values.T).to(self.inputs.wide)
        return self._with_mean(mean, lifted.unflatten(1, (self.count, -1)))

    def backward(self, classes: slice, gradient: Tensor) -> None:
        """Add gradients of the classifier and of W′; sum those of the noise over the classes."""
        flat = self._split(classes, gradient).flatten(1)  # [k, n·P′]
        self.gradients.add_product("projection", classes, flat, self.values)
        of_values = self._times(flat.T, self.projection[classes])
        self.gathered = of_values if self.gathered is None else self.gathered.add_(of_values)

    def finish(self) -> None:
        """Add gradients of the noise and of τ."""
        if self.gathered is not None:
            self._scale(self.gathered, self.values)
            self._noise_backward(self.noise_rows, self.gathered.unflatten(0, (self.count, -1)))
        super().finish()


def row_block(context: Context, examples: slice) -> RowBlock:
    """Return the row block of some examples, by the kind of their lift."""
    mean, noise = context.inputs.mean, context.inputs.noise
    beside = {"identity": ClassNoiseRows, "hash": HashRows, "projection": ProjectionRows}
    if noise is not None and noise.lift.kind in beside:
        return beside[noise.lift.kind](noise, context, examples)
    if isinstance(mean, GivenMean):
        return MeanRows(context, examples)
    return ClassifierRows(mean, noise, context, examples)
