"""Heads that stand where a model had its last layer: the layer's parameters keep their names, and calls their shapes.

fc.weight, fc.bias                   the layer's own, by reference: tied weights stay tied
fc.covariance.*, fc.temperature.*    what the head adds
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl.functional import Affine
from hetxl.functional._checks import one_of
from hetxl.functional.engine.predict import METHODS
from hetxl.nn import DetHead, Head, HetHashHead, HetHead, HetXLHead

_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)

_CHANGED = (
    "the model changes the values that its head returns (a softmax, scaling, capping, rounding or averaging), so the "
    "head's probabilities would not be the model's; take that out of the model, or name another layer= to convert"
)


class Captured:
    """What a layer was called with, and which of its rows a model's output is made of.

    Inside `Capturing.capture()` the layer does no work: it keeps its features and returns each row's number in the
    place of its outputs. Whatever a model does with rows afterwards, such as taking every sequence's last token, can be
    read from the numbers that come out, and `_numbers` makes them so that a change of them shows.
    """

    def __init__(self) -> None:
        self.features: Tensor | None = None

    def stand_in(self, features: Tensor, num_classes: int) -> Tensor:
        """Row numbers [..., K] for features [..., D], without memory for K."""
        if self.features is not None:
            raise ValueError(
                "the head was called twice in one pass of the model: which rows are the model's cannot be told, for a "
                "fused loss, a prediction or an export; train with the model's output instead, as with a linear layer"
            )
        self.features = features
        rows = features.shape[:-1].numel()
        dtype = torch.float32 if rows <= _rows_of(torch.float32) else torch.float64
        numbers = _numbers(torch.arange(rows, device=features.device)).to(dtype)
        return numbers.reshape(*features.shape[:-1], 1).expand(*features.shape[:-1], num_classes)

    def rows(self, numbers: Tensor) -> Tensor:
        """The features [..., D] of the rows whose numbers a model returned, [...]."""
        flat = self._flat()
        if len(flat) > _rows_of(numbers.dtype):
            raise ValueError(
                f"the model returns its head's output as {numbers.dtype}, which tells only "
                f"{_rows_of(numbers.dtype)} rows apart, and there are {len(flat)}; return it as float32, as it comes"
            )
        found = numbers.detach().double()
        whole = -found.round().long()
        odd = whole // (whole & -whole).clamp(min=1)  # the lowest bit of a number is its power of two
        wanted = ((odd - 1) // 2).clamp(0, len(flat) - 1)
        if not torch.equal(_numbers(wanted).double(), found):
            raise ValueError(_CHANGED)
        if wanted.numel() == len(flat) and torch.equal(wanted.flatten(), torch.arange(len(flat), device=wanted.device)):
            return flat.reshape(*numbers.shape, -1)
        return flat[wanted]

    def rows_of(self, outputs: Tensor, num_classes: int) -> Tensor:
        """The features [..., D] behind a model's outputs, [..., K], or with the classes in another place."""
        self._flat()
        places = [dim for dim in reversed(range(outputs.dim())) if outputs.shape[dim] == num_classes]
        if not places:
            raise ValueError(
                f"the model's output must have {num_classes} classes last, as its head's, "
                f"found shape {list(outputs.shape)}"
            )
        # Sizes alone do not tell: a picture may be as wide as there are classes. A row has one number for all classes.
        for dim in places:
            numbers = outputs.select(dim, 0)
            # As the layer made them, all classes are one place in memory.
            if outputs.stride(dim) == 0 or torch.equal(numbers.unsqueeze(dim).expand_as(outputs), outputs):
                return self.rows(numbers)
        raise ValueError(_CHANGED)

    def _flat(self) -> Tensor:
        """The features of all rows, [*, D]."""
        if self.features is None:
            raise ValueError("the model did not call its head in this pass")
        return self.features.reshape(-1, self.features.shape[-1])


def _numbers(rows: Tensor) -> Tensor:
    """Row r as −(2 r + 1)·2ᵉ, int64, with e of 0 to 4 by a hash of r.

    Odd, so that one which is rounded, as in half precision, shows. Negative, so that a ReLU or a sigmoid does. By
    powers of two that follow no rule, so that an average, which would be the middle one of evenly spaced numbers, does.
    """
    return -((2 * rows + 1) << (rows * 0x9E3779B1 >> 16) % 5)  # the golden ratio, as in Fibonacci hashing


def _rows_of(dtype: torch.dtype) -> int:
    """How many of these numbers, from row 0 on, a floating-point dtype holds exactly: 128 in bfloat16."""
    return int(1 / torch.finfo(dtype).eps)


class Capturing:
    """Mixed into modules whose calls can be captured."""

    _captured: Captured | None = None

    @property
    def capturing(self) -> bool:
        """Whether a call is inside `capture()`."""
        return self._captured is not None

    @contextlib.contextmanager
    def capture(self) -> Iterator[Captured]:
        """Inside, the module keeps the features that it is called with, and returns their row numbers."""
        self._captured = Captured()
        try:
            yield self._captured
        finally:
            self._captured = None


def logits_of(output: Any) -> Tensor:
    """The tensor that a model returned, by itself or as the `.logits` of an object."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TypeError(f"the model's output must be a tensor or have .logits, found {type(output).__name__}")
    return logits


class HeadLayer(Capturing, Head):
    """A head in the place of an nn.Linear or a 1 × 1 nn.Conv2d; mixed into the four heads.

    Called with features alone it returns log-probabilities in the shape of the layer's output, [..., K], or
    [B, K, H, W] for a convolution (sigmoid: logits of the mean probabilities): under softmax and cross-entropy what
    logits would be. Without noise it returns the logits themselves, those of the layer bit for bit where τ = 1.

    Args:
        layer: that it replaces; its parameters are taken by reference, its hooks are moved.
        eval_method: how outputs are averaged in evaluation mode, as `method` of `head.predict`.
        **options: of the head.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear | nn.Conv2d, *, eval_method: str = "mc", **options: Any):
        num_classes, in_features = layer.weight.shape[:2]
        one_of("eval_method", eval_method, METHODS)
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        # A stand-in of the right sizes: the parameters themselves belong to this module, under the layer's names.
        sizes = nn.Linear(in_features, num_classes, bias=layer.bias is not None, device="meta")
        super().__init__(in_features, num_classes, classifier=sizes, **like, **options)
        del self.classifier
        self.take(layer)
        self.eval_method = eval_method
        self.convolution = isinstance(layer, nn.Conv2d)
        self.train(layer.training)
        move_hooks(layer, self)

    def take(self, layer: nn.Linear | nn.Conv2d) -> None:
        """Take a layer's parameters by reference.

        Args:
            layer: of as many features; after the first time also of other classes, if `takes_any_classes`.
        """
        assert isinstance(layer.weight, nn.Parameter)
        self.num_classes = layer.weight.shape[0]
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias if isinstance(layer.bias, nn.Parameter) else None)

    @property
    def takes_any_classes(self) -> bool:
        """Whether the head adds nothing that depends on the number of classes."""
        return not self._lifts_beside()

    def _affine(self) -> Affine:
        return Affine(self.weight.flatten(1), self.bias)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, the layer's as torch does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)
        for module in (self.covariance, self.temperature):
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def forward(self, features: Tensor, targets: Any = None, *, rows: bool = False, **options: Any) -> Tensor:
        """As of the layer, [..., D] to [..., K] (a convolution: [B, D, H, W] to [B, K, H, W]); with targets the loss.

        Args:
            features: [..., D], or [B, D, H, W] for a convolution.
            targets: as for `Head.forward`; class ids [B, H, W] for a convolution.
            rows: features are rows [..., D] also for a convolution, as `Captured.rows` gives them.
            **options: as for `Head.forward`.
        """
        pictures = self.convolution and not rows and features.dim() > 2
        plain = targets is None and not options and self._captured is None
        if plain and (self.covariance is None or self._method == "deterministic"):
            logits = F.conv2d(features, self.weight, self.bias) if pictures else self._affine()(features)
            return self._over_temperature(logits)
        if pictures:
            features = features.movedim(-3, -1)
        if targets is None and self._captured is not None:
            found = self._captured.stand_in(features, self.num_classes)
        elif plain and self._method != "mc":
            found = self._without_samples(features)
        else:
            found = super().forward(features, targets, **options)
            if targets is None and found.requires_grad:
                # A model may mask or scale its layer's output in place; the gradients need what the engine returned.
                found = found.clone()
        return found.movedim(-1, -3) if pictures and targets is None else found

    @property
    def _method(self) -> str:
        if self.training:
            return "mc"
        return self.eval_method if self.noise_scale else "deterministic"

    def _without_samples(self, features: Tensor) -> Tensor:
        log_probs = self.predict(features, method=self.eval_method).log_probs
        # Sigmoid: each log-probability as its logit, log p − log(1 − p).
        return log_probs if self.link == "softmax" else log_probs - torch.log(-torch.expm1(log_probs))

    def mean_logits(self, features: Tensor) -> Tensor:
        """(W φ + b) / τ, [..., K], of features [..., D]: the logits without noise."""
        return self._over_temperature(self._affine()(features))

    def _over_temperature(self, logits: Tensor) -> Tensor:
        temperature = self.temperature()
        return logits if isinstance(temperature, float) and temperature == 1 else logits / temperature

    def layer(self, fold: bool = True) -> nn.Linear | nn.Conv2d:
        """The deterministic layer with these parameters, by reference.

        Args:
            fold: divide weight and bias by τ, in place, where it is not 1, so that the layer's softmax is the head's
                without noise.
        """
        num_classes, in_features = self.weight.shape[:2]
        bias = self.bias is not None
        made: nn.Linear | nn.Conv2d
        if self.convolution:
            made = nn.Conv2d(in_features, num_classes, 1, bias=bias, device="meta")
        else:
            made = nn.Linear(in_features, num_classes, bias=bias, device="meta")
        with torch.no_grad():
            temperature = float(self.temperature())
            if fold and temperature != 1:
                self.weight.div_(temperature)
                if self.bias is not None:
                    self.bias.div_(temperature)
        made.weight = self.weight
        made.register_parameter("bias", self.bias)
        made.train(self.training)
        move_hooks(self, made)
        return made


class DetLayer(HeadLayer, DetHead):
    """DET in the place of a layer."""


class HetLayer(HeadLayer, HetHead):
    """HET in the place of a layer."""


class HetHashLayer(HeadLayer, HetHashHead):
    """HET-H in the place of a layer."""


class HetXLLayer(HeadLayer, HetXLHead):
    """HET-XL in the place of a layer."""


LAYERS: dict[str, type[HeadLayer]] = {"det": DetLayer, "het": HetLayer, "het-h": HetHashLayer, "het-xl": HetXLLayer}
"""By the names of `hetxl.nn.HEADS`."""


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hand over the hooks that users registered, with the handles that remove them."""
    for name in _HOOKS:
        if name in old.__dict__:
            # The dictionary itself: a handle finds its hook through it.
            new.__dict__[name] = old.__dict__[name]
            old.__dict__[name] = type(old.__dict__[name])() if isinstance(old.__dict__[name], dict) else None
