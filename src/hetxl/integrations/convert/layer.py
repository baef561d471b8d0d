"""Heads that stand where a model had its last layer: the layer's parameters keep their names, and calls their shapes.

fc.weight, fc.bias                   the layer's own, by reference: tied weights stay tied
fc.covariance.*, fc.temperature.*    what the head adds
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl._checks import one_of
from hetxl.functional import Affine
from hetxl.functional.engine.predict import METHODS
from hetxl.integrations.convert.capture import Capturing
from hetxl.nn import HEADS, Head

_HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


class HeadLayer(Capturing, Head):
    """A head in the place of an nn.Linear or a 1 × 1 nn.Conv2d; mixed into the four heads.

    Called with features alone it returns log-probabilities in the shape of the layer's output, [..., K], or
    [B, K, H, W] for a convolution (sigmoid: logits of the mean probabilities): under softmax and cross-entropy what
    logits would be. Without noise it returns the logits themselves, those of the layer bit for bit where τ = 1.

    Args:
        layer: that it replaces; its parameters are taken by reference, its hooks are moved.
        eval_method: how outputs are averaged in evaluation mode, as `method` of `head.predict`.
        train_logits: whether a model of transformers returns logits beside its loss in training, too.
        **options: of the head.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, layer: nn.Linear | nn.Conv2d, *, eval_method: str = "mc", train_logits: bool = False, **options: Any
    ):
        num_classes, in_features = layer.weight.shape[:2]
        one_of("eval_method", eval_method, METHODS)
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        # A stand-in of the right sizes: the parameters themselves belong to this module, under the layer's names.
        sizes = nn.Linear(in_features, num_classes, bias=layer.bias is not None, device="meta")
        super().__init__(in_features, num_classes, classifier=sizes, **like, **options)
        self.take(layer)
        self.eval_method, self.train_logits = eval_method, train_logits
        self.convolution = isinstance(layer, nn.Conv2d)
        self.train(layer.training)
        move_hooks(layer, self)

    def _register_classifier(self, layer: Any) -> None:
        """Leave the stand-in out: `take` registers the parameters."""

    def take(self, layer: nn.Linear | nn.Conv2d) -> None:
        """Take a layer's parameters by reference; other classes than the first time's if `takes_any_classes`."""
        assert isinstance(layer.weight, nn.Parameter)
        self.num_classes = layer.weight.shape[0]
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias if isinstance(layer.bias, nn.Parameter) else None)

    @property
    def takes_any_classes(self) -> bool:
        """Return whether the head adds nothing that depends on the number of classes."""
        return not self._bypasses_classifier

    def _affine(self) -> Affine:
        return Affine(self.weight.flatten(1), self.bias)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, the layer's as torch does."""
        nn.Linear.reset_parameters(self)  # pyright: ignore[reportArgumentType]
        for module in (self.covariance, self.temperature):
            getattr(module, "reset_parameters", lambda: None)()

    def forward(self, features: Tensor, targets: Any = None, *, rows: bool = False, **options: Any) -> Tensor:
        """As of the layer, [..., D] to [..., K] (a convolution: [B, D, H, W] to [B, K, H, W]); with targets the loss.

        Args:
            features: [..., D], or [B, D, H, W] for a convolution.
            targets: as for `Head.forward`, and so are the options; class ids [B, H, W] for a convolution.
            rows: features are rows [..., D] also for a convolution, as `Captured.rows` gives them.
        """
        images = self.convolution and not rows and features.dim() > 2
        plain = targets is None and not options and self._captured is None
        if plain and (self.covariance is None or self._method == "deterministic"):
            logits = F.conv2d(features, self.weight, self.bias) if images else self._affine()(features)
            return self._over_temperature(logits)
        if images:
            features = features.movedim(-3, -1)
        if targets is None and self._captured is not None:
            output = self._captured.stand_in(features, self.num_classes)
        elif plain and self._method != "mc":
            output = self.predict(features, method=self.eval_method).log_probs
            if self.link == "sigmoid":  # each log-probability as its logit, log p − log(1 − p)
                output = output - torch.log(-torch.expm1(output))
        else:
            output = super().forward(features, targets, **options)
            if targets is None and output.requires_grad:
                # A model may mask or scale its layer's output in place; the gradients need what the engine returned.
                output = output.clone()
        return output.movedim(-1, -3) if images and targets is None else output

    @property
    def _method(self) -> str:
        if self.training:
            return "mc"
        return self.eval_method if self.noise_scale else "deterministic"

    def mean_logits(self, features: Tensor) -> Tensor:
        """(W φ + b) / τ, [..., K], of features [..., D]: the logits without noise."""
        return self._over_temperature(self._affine()(features))

    def _over_temperature(self, logits: Tensor) -> Tensor:
        temperature = self.temperature()
        return logits if isinstance(temperature, float) and temperature == 1 else logits / temperature

    def layer(self, fold: bool = True) -> nn.Linear | nn.Conv2d:
        """Return the deterministic layer with these parameters, by reference.

        With `fold`, weight and bias are divided by τ, in place, where it is not 1, so that the layer's softmax is the
        head's without noise.
        """
        num_classes, in_features = self.weight.shape[:2]
        kind = functools.partial(nn.Conv2d, kernel_size=1) if self.convolution else nn.Linear
        plain: Any = kind(in_features, num_classes, bias=self.bias is not None, device="meta")
        with torch.no_grad():
            temperature = float(self.temperature())
            if fold and temperature != 1:
                self.weight.div_(temperature)
                if self.bias is not None:
                    self.bias.div_(temperature)
        plain.weight = self.weight
        plain.register_parameter("bias", self.bias)
        plain.train(self.training)
        move_hooks(self, plain)
        return plain


def _layer_class(head: type[Head]) -> type[HeadLayer]:
    """Return the class that puts a head in the place of a layer, such as HetXLLayer for HetXLHead."""
    entries = {"__module__": __name__, "__doc__": f"`{head.__name__}` in the place of a layer."}
    return type(head.__name__.replace("Head", "Layer"), (HeadLayer, head), entries)


LAYERS: dict[str, type[HeadLayer]] = {name: _layer_class(head) for name, head in HEADS.items()}
"""By the names of `hetxl.nn.HEADS`."""
globals().update({layer.__name__: layer for layer in LAYERS.values()})  # pickle finds a class by its name


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hand over the hooks that users registered, with the handles that remove them."""
    for name in _HOOKS:
        if name in old.__dict__:
            # The dictionary itself: a handle finds its hook through it.
            new.__dict__[name] = old.__dict__[name]
            old.__dict__[name] = type(old.__dict__[name])() if isinstance(old.__dict__[name], dict) else None
