"""Evaluate the blocks of a plan: losses and log-probabilities, with their gradients."""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from hetxl.functional._torch import slices
from hetxl.functional.engine import softmax
from hetxl.functional.engine.inputs import Inputs
from hetxl.functional.engine.logit_rows import Context, RowBlock, row_block
from hetxl.functional.engine.plan import CACHED_LOGITS, Plan
from hetxl.functional.engine.sigmoid import MeanSigmoid, mean_sigmoid_rows
from hetxl.functional.engine.softmax import MeanLogProbs, Mixer, Normalisers
from hetxl.functional.links import log_mean_exp

UNDERFLOW = 1e6  # a mean probability below this times the smallest number is computed in logarithms

Visit = Callable[[slice, slice, MeanSigmoid], Tensor | None]


def _length(part: slice) -> int:
    return part.stop - part.start


def mixing_of(inputs: Inputs, examples: slice) -> Tensor:
    """Return z̃ = [1, z] / τ of some examples, [n, S, Q + 1]."""
    assert inputs.noise is not None
    z = inputs.noise.normals[examples].to(inputs.wide)
    return torch.cat((z.new_ones(*z.shape[:2], 1), z), dim=-1) / inputs.temperature


def pairs_of(inputs: Inputs) -> Tensor | None:
    """Return the first of each pair of samples z, −z, [S/2, Q] or [B, S/2, Q]; None if they are not pairs."""
    if inputs.noise is None or inputs.noise.z is None or inputs.samples % 2:
        return None
    z = inputs.noise.z
    z = z[0] if z.stride(0) == 0 else z
    half = z[..., 0::2, :]
    return half if not z.is_meta and torch.equal(half, -z[..., 1::2, :]) else None


class Evaluation:
    """One pass of an evaluation over its blocks."""

    def __init__(self, inputs: Inputs, plan: Plan, products: torch.dtype, needed: frozenset[str] = frozenset()):
        self.inputs, self.plan, self.products = inputs, plan, products  # inputs without gradients
        self.context = Context.of(inputs, plan.order, products, needed)
        self.gradients, self.workspace = self.context.gradients, self.context.workspace
        self.backward = bool(needed)
        self.classes = slice(0, inputs.num_classes)
        self.like = self.workspace.like

    def blocks(self) -> Iterator[tuple[slice, RowBlock]]:
        """Iterate over blocks of examples with their rows; after each, backpropagate its sums to the inputs."""
        for examples in slices(self.inputs.batch, self.plan.batch_block):
            rows = row_block(self.context, examples)
            yield examples, rows
            if self.backward:
                rows.finish()

    def softmax_nll(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Return −log p̄[y], [B], of labels `ids` [B]; add gradients of Σ weights [B] · loss to `gradients`."""
        losses = self.like.new_empty(self.inputs.batch)
        if self.plan.passes == 2:
            self._softmax_nll_in_two_passes(ids, weights, losses)
        elif self.plan.order == "samples":
            self._samples_nll(ids, weights, losses)
        else:
            self._factors_nll(ids, weights, losses)
        return losses

    def _samples_nll(self, ids: Tensor, weights: Tensor, losses: Tensor) -> None:
        """Compute losses with the sampled logits of all classes [K, n, S] in memory, in cache-sized slices.

        log_p = log_softmax(logits, 0)[y];  losses = -log_mean_exp(log_p)                       # [n]
        gradient = (softmax(logits, 0) - onehot(y)) * softmax(log_p) * weights / τ              # [K, n, S]
        """
        for examples, block in self.blocks():
            labels, count, block.keeps = ids[examples], _length(examples), True
            parts = list(slices(self.inputs.num_classes, self._cached_classes(block)))
            normalisers, tops, logits = Normalisers(self.like, count, self.plan.rows), [], []
            width = count * self.plan.rows
            buffer = self.workspace.take("logits", self.inputs.num_classes * width)
            for part in parts:
                logits.append(block.logits(part, buffer[part.start * width : part.stop * width]))  # [k, n, S]
                tops.append(normalisers.add(logits[-1].transpose(0, 1), labels, slice(None), part.start))
            normaliser, log_p = normalisers.finished()
            losses[examples] = -log_mean_exp(log_p, dim=-1)
            if not self.backward:
                continue
            # This is the gradient of the rows, which are τ times the logits.
            share = log_p.softmax(-1) * (weights[examples] / self.inputs.temperature).unsqueeze(-1)
            for part, top, gradient in zip(parts, tops, logits, strict=True):
                gradient.mul_(share * (top - normaliser).exp())
                softmax.subtract_at_targets(gradient, labels, share, part.start)
                block.backward(part, gradient)

    def _cached_classes(self, block: RowBlock) -> int:
        """Return the number of classes, in whole vectors, whose sampled logits fit in the cache with the rows of W and
        their gradients."""
        if self.like.device.type != "cpu":
            return self.inputs.num_classes
        return max(
            softmax.VECTOR, CACHED_LOGITS // (2 * block.count * self.plan.rows) // softmax.VECTOR * softmax.VECTOR
        )

    def _factors_nll(self, ids: Tensor, weights: Tensor, losses: Tensor) -> None:
        mixer = self._shared_mixer
        for examples, block in self.blocks():
            rows = block.lift(self.classes)  # [K, n, P]
            mixing = mixing_of(self.inputs, examples)
            for group, inside in self._groups(examples):
                mixer.start(rows[:, inside])
                losses[group], scale = softmax.factors_nll(
                    mixer, mixing[inside], ids[group], self.plan.sample_block, self.backward
                )
                if self.backward:
                    torch.mul(mixer.gradient(), (scale * weights[group]).unsqueeze(-1), out=rows[:, inside])
            if self.backward:
                block.backward(self.classes, rows)

    def _mixer(self, classes: int) -> Mixer:
        return Mixer(self.plan.group, classes, self.plan.rows, self.plan.sample_block, self.like)

    def _groups(self, examples: slice) -> Iterator[tuple[slice, slice]]:
        """Split the examples of a block into groups; yield each group's slice of the batch and of the block."""
        for inside in slices(_length(examples), self.plan.group):
            yield slice(examples.start + inside.start, examples.start + inside.stop), inside

    def _softmax_nll_in_two_passes(self, ids: Tensor, weights: Tensor, losses: Tensor) -> None:
        """Process the classes in blocks: the first pass computes the normalisers, the second the gradients."""
        for examples, block in self.blocks():
            labels = ids[examples]
            normalisers = Normalisers(self.like, _length(examples), self.inputs.samples)
            for classes in slices(self.inputs.num_classes, self.plan.class_block):
                for group, samples, logits, _ in self._by_group(block, examples, classes):
                    normalisers.of(group).add(logits, labels[group], samples, classes.start)
            normaliser, log_p = normalisers.finished()
            losses[examples] = -log_mean_exp(log_p, dim=-1)
            if not self.backward:
                continue
            share = log_p.softmax(-1) * weights[examples].unsqueeze(-1)  # [n, S]
            for classes in slices(self.inputs.num_classes, self.plan.class_block):
                for _, samples, logits, mixing in self._by_group(block, examples, classes):  # there is only one group
                    logits.sub_(normaliser[:, None, samples]).exp_()  # p_s, [n, k, s]
                    if mixing is not None:
                        self._block_mixer.add(logits, mixing * share[:, samples].unsqueeze(-1))
                        continue
                    gradient = logits.mul_(share.unsqueeze(1)).transpose(0, 1)
                    softmax.subtract_at_targets(gradient, labels, share, classes.start)
                    block.backward(classes, gradient.div_(self.inputs.temperature))
                if self.plan.order == "factors":
                    at_target = (mixing_of(self.inputs, examples) * share.unsqueeze(-1)).sum(1)  # [n, P]
                    gradient = self._block_mixer.gradient()
                    softmax.subtract_at_targets(gradient, labels, at_target, classes.start)
                    block.backward(classes, gradient)

    def softmax_log_probs(self, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Return log p̄, [B, K], and if requested the mean entropy of the samples, [B]."""
        out = self.like.new_empty(self.inputs.batch, self.inputs.num_classes)
        expected = self.like.new_zeros(self.inputs.batch)
        if self.plan.passes == 2:  # the first pass computes the normalisers, the second the means
            self.log_probs_given(self.log_normalisers(None), out, expected)
            return out, expected
        paired = self.plan.order == "factors" and pairs_of(self.inputs) is not None
        for examples, block in self.blocks():
            rows = block.lift(self.classes)
            for group, inside in self._groups(examples):
                out[group] = 0
                if paired:
                    out[group] = self._sum_of_pairs(rows[:, inside], group, expected[group] if entropy else None)
                    continue
                for logits, _ in self._mixed(rows[:, inside], group):
                    scratch = self.workspace.take("exponentials", logits.numel())
                    out[group] += softmax.sum_of_softmax(logits, scratch, expected[group] if entropy else None)
        expected /= self.inputs.samples
        out /= self.inputs.samples
        if out.is_meta:  # shapes only
            return out, expected
        # Check once at the end, since a check for each block would synchronise with the device.
        lost = (out < UNDERFLOW * torch.finfo(out.dtype).tiny).any(-1).nonzero().squeeze(-1)
        out.log_()
        if len(lost):
            others = Evaluation(self.inputs.of_examples(lost), self.plan, self.products)
            out[lost] = others._log_probs_in_the_logarithm()
        return out, expected

    def _sum_of_pairs(self, rows: Tensor, group: slice, entropies: Tensor | None) -> Tensor:
        """Sum the softmax over samples in pairs z, −z, [g, K], from rows [K, g, P], with one product and one
        exponential for each pair."""
        half = pairs_of(self.inputs)
        assert half is not None
        z = (half if half.dim() == 2 else half[group]).to(self.like.dtype) / self.inputs.temperature
        mixing = torch.cat((torch.zeros_like(z[..., :1]), z), dim=-1).expand(_length(group), -1, -1)
        self._shared_mixer.start(rows)
        sums = softmax.PairSums(rows[..., 0].T / self.inputs.temperature)
        # Smaller blocks than for logits, because three tensors of this size are in use.
        together = max(
            softmax.VECTOR, CACHED_LOGITS // (4 * self.inputs.num_classes) // softmax.VECTOR * softmax.VECTOR
        )
        for samples in slices(mixing.shape[1], min(self.plan.sample_block, together)):
            noise = self._shared_mixer.sample(mixing[:, samples])  # [g, K, s]
            sums.add(noise, self.workspace.take("exponentials", noise.numel()).view_as(noise), entropies)
        return sums.probs

    def _log_probs_in_the_logarithm(self) -> Tensor:
        """Return log p̄, [B, K], with two exponentials for each logit instead of one; correct where p̄ underflows."""
        out = self.like.new_empty(self.inputs.batch, self.inputs.num_classes)
        for examples, block in self.blocks():
            rows = block.lift(self.classes)
            for group, inside in self._groups(examples):
                mean = MeanLogProbs(self.like, _length(group), self.inputs.num_classes)
                for logits, _ in self._mixed(rows[:, inside], group):
                    mean.add(softmax.log_softmax_columns(logits))
                out[group] = mean.finished()
        return out

    def log_normalisers(self, excluded: Tensor | None) -> Tensor:
        """Return logsumexp of the sampled logits over the classes except `excluded` [B] (−1 for none), [B, S]."""
        out = self.like.new_empty(self.inputs.batch, self.inputs.samples)
        for examples, block in self.blocks():
            count = _length(examples)
            no_label = torch.full((count,), -1, device=self.like.device)
            normalisers = Normalisers(self.like, count, self.inputs.samples)
            for classes in slices(self.inputs.num_classes, self.plan.class_block):
                for group, samples, logits, _ in self._by_group(block, examples, classes):
                    softmax.exclude(logits, excluded, examples, group, classes)
                    normalisers.of(group).add(logits, no_label[group], samples, classes.start)
            out[examples] = normalisers.finished()[0]
        return out

    def log_normalisers_backward(self, normaliser: Tensor, gradient: Tensor, excluded: Tensor | None) -> None:
        """Add gradients, given that of the normalisers, both [B, S]: d u_s = gradient_s · softmax(u_s)."""
        for examples, block in self.blocks():
            top, share = normaliser[examples].unsqueeze(1), gradient[examples].unsqueeze(1)  # [n, 1, S]
            for classes in slices(self.inputs.num_classes, self.plan.class_block):
                rows: Tensor | None = None
                for group, samples, logits, mixing in self._by_group(block, examples, classes):
                    softmax.exclude(logits, excluded, examples, group, classes)
                    logits.sub_(top[group, :, samples]).exp_().mul_(share[group, :, samples])  # [g, k, s]
                    if mixing is None:
                        block.backward(classes, logits.transpose(0, 1).div_(self.inputs.temperature))
                        continue
                    self._block_mixer.add(logits, mixing)
                    if samples.stop == self.inputs.samples:
                        if rows is None:
                            rows = self.like.new_empty(_length(classes), _length(examples), self.plan.rows)
                        rows[:, group] = self._block_mixer.gradient()
                if rows is not None:
                    block.backward(classes, rows)

    def log_probs_given(self, normaliser: Tensor, out: Tensor, expected: Tensor) -> None:
        """Write log mean_s exp(u_s − normaliser_s) into `out` [B, K], and add Σ_k of the samples' mean entropies to
        `expected` [B]. The normaliser [B, S] may include further classes."""
        for examples, block in self.blocks():
            for classes in slices(self.inputs.num_classes, self.plan.class_block):
                means: dict[int, MeanLogProbs] = {}
                for group, samples, logits, _ in self._by_group(block, examples, classes):
                    logits.sub_(normaliser[examples][group, None, samples])
                    expected[examples][group] -= (logits.exp() * logits).sum((1, 2)) / self.inputs.samples
                    if group.start not in means:
                        means = {group.start: MeanLogProbs(self.like, _length(group), _length(classes))}
                    means[group.start].add(logits)
                    if samples.stop == self.inputs.samples:
                        out[examples, classes][group] = means[group.start].finished()

    def _by_group(
        self, block: RowBlock, examples: slice, classes: slice
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
        """Yield sampled logits [g, k, s] of some classes with their mixing, by groups of the block's examples and
        blocks of samples."""
        if self.plan.order == "samples":
            everyone, all_samples = slice(0, _length(examples)), slice(0, self.inputs.samples)
            yield everyone, all_samples, block.logits(classes).transpose(0, 1), None
            return
        rows, mixing = block.lift(classes), mixing_of(self.inputs, examples)
        for _, inside in self._groups(examples):
            self._block_mixer.start(rows[:, inside])
            for samples in slices(self.inputs.samples, self.plan.sample_block):
                yield inside, samples, self._block_mixer.sample(mixing[inside, samples]), mixing[inside, samples]

    @cached_property
    def _block_mixer(self) -> Mixer:
        return self._mixer(self.plan.class_block)

    def softmax_log_probs_backward(self, log_probs: Tensor, gradient: Tensor) -> None:
        """Add gradients to `gradients`, given that of log p̄, both [B, K]."""
        for examples, block in self.blocks():
            rows = block.lift(self.classes)  # [K, n, P], overwritten by their gradient, group by group
            for group, inside in self._groups(examples):
                for logits, mixing in self._mixed(rows[:, inside], group):
                    of_logits = softmax.log_probs_gradient(
                        softmax.log_softmax_columns(logits), log_probs[group], gradient[group], self.inputs.samples
                    )
                    if mixing is None:
                        rows[:, inside] = of_logits.div_(self.inputs.temperature).transpose(0, 1)
                    else:
                        self._shared_mixer.add(of_logits, mixing)
                if self.plan.order == "factors":
                    rows[:, inside] = self._shared_mixer.gradient()
            block.backward(self.classes, rows)

    def _mixed(self, rows: Tensor, group: slice) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield sampled logits [g, K, s] of a group with their mixing, from its rows [K, g, P]."""
        if self.plan.order == "samples":
            yield rows.div_(self.inputs.temperature).transpose(0, 1), None
            return
        mixing = mixing_of(self.inputs, group)
        self._shared_mixer.start(rows)
        for samples in slices(self.inputs.samples, self.plan.sample_block):
            yield self._shared_mixer.sample(mixing[:, samples]), mixing[:, samples]

    @cached_property
    def _shared_mixer(self) -> Mixer:
        return self._mixer(self.inputs.num_classes)

    def sigmoid(self, visit: Visit, entropy: bool = False) -> None:
        """Iterate over blocks of examples and classes. `visit` takes their means [k, n] and returns the factor [k, n]
        that turns σ(u) σ(−u) into the gradient of u, or None for no gradients."""
        for examples, block in self.blocks():
            for classes in slices(self.inputs.num_classes, self.plan.class_block):
                if self.plan.order == "samples":
                    logits = block.logits(classes)
                    factor = visit(examples, classes, mean_sigmoid_rows(logits, self.backward, entropy))
                    if factor is not None:
                        block.backward(classes, logits.mul_(factor.unsqueeze(-1) / self.inputs.temperature))
                    continue
                rows = block.lift(classes)  # [k, n, P]
                self._sigmoid_of_factors(visit, examples, classes, rows, entropy)
                if self.backward:
                    block.backward(classes, rows)

    def _sigmoid_of_factors(self, visit: Visit, examples: slice, classes: slice, rows: Tensor, entropy: bool) -> None:
        """Process one example at a time, its classes in cache-sized blocks; overwrite rows by their gradients."""
        mixing = mixing_of(self.inputs, examples)
        step = max(16, CACHED_LOGITS // self.inputs.samples)
        for example in range(_length(examples)):
            which = slice(examples.start + example, examples.start + example + 1)
            z = mixing[example]  # [S, P]
            buffer = self.like.new_empty(min(step, rows.shape[0]), z.shape[0])
            for part in slices(rows.shape[0], step):
                of_all = slice(classes.start + part.start, classes.start + part.stop)
                logits = torch.mm(rows[part, example], z.T, out=buffer[: _length(part)])  # [k, S]
                factor = visit(which, of_all, mean_sigmoid_rows(logits.unsqueeze(1), self.backward, entropy))
                if factor is not None:
                    torch.mul(logits @ z, factor, out=rows[part, example])
