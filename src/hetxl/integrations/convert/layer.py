"""Heads that replace the last layer of a model; the layer's parameters keep their names, and calls their shapes.

fc.weight, fc.bias                   parameters of the layer, by reference: tied weights stay tied
fc.covariance.*, fc.temperature.*    parameters that the head adds
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
    """A head that replaces an nn.Linear or a 1 × 1 nn.Conv2d; mixed into the four heads.

    Called without targets, it returns log-probabilities in the shape of the layer's output, [..., K], or [B, K, H, W]
    for a convolution (sigmoid: logits of the mean probabilities), which softmax and cross-entropy accept like logits.
    Without noise it returns logits, which equal those of the layer bit for bit if τ = 1.

    Args:
        layer: the layer to replace; its parameters are kept by reference, its hooks are moved.
        eval_method: `method` of `head.predict` for outputs in evaluation mode.
        train_logits: whether a model of transformers also returns logits in training.
        **options: options of the head.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, layer: nn.Linear | nn.Conv2d, *, eval_method: str = "mc", train_logits: bool = False, **options: Any
    ):
        num_classes, in_features = layer.weight.shape[:2]
        one_of("eval_method", eval_method, METHODS)
        like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        # A placeholder of the right sizes; the parameters belong to this module, under the layer's names.
        sizes = nn.Linear(in_features, num_classes, bias=layer.bias is not None, device="meta")
        super().__init__(in_features, num_classes, classifier=sizes, **like, **options)
        self.take(layer)
        self.eval_method, self.train_logits = eval_method, train_logits
        self.convolution = isinstance(layer, nn.Conv2d)
        self.train(layer.training)
        move_hooks(layer, self)

    def _register_classifier(self, layer: Any) -> None:
        """Do not register the placeholder; `take` registers the parameters."""

    def take(self, layer: nn.Linear | nn.Conv2d) -> None:
        """Use a layer's parameters by reference; the number of classes may change if `takes_any_classes`."""
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
        """Initialise all parameters again, those of the layer like torch."""
        nn.Linear.reset_parameters(self)  # pyright: ignore[reportArgumentType]
        for module in (self.covariance, self.temperature):
            getattr(module, "reset_parameters", lambda: None)()

    def forward(self, features: Tensor, targets: Any = None, *, rows: bool = False, **options: Any) -> Tensor:
        """Map [..., D] to [..., K] like the layer (a convolution: [B, D, H, W] to [B, K, H, W]), or return a loss.

        Args:
            features: [..., D], or [B, D, H, W] for a convolution.
            targets: see `Head.forward`, also for the options; class ids [B, H, W] for a convolution.
            rows: features are rows [..., D] also for a convolution, as returned by `Captured.rows`.
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
            if self.link == "sigmoid":  # convert log-probabilities to logits, log p − log(1 − p)
                output = output - torch.log(-torch.expm1(output))
        else:
            output = super().forward(features, targets, **options)
            if targets is None and output.requires_grad:
                # A model may change the output in place, but the gradients need the values that the engine returned.
                output = output.clone()
        return output.movedim(-1, -3) if images and targets is None else output

    @property
    def _method(self) -> str:
        if self.training:
            return "mc"
        return self.eval_method if self.noise_scale else "deterministic"

    def mean_logits(self, features: Tensor) -> Tensor:
        """Compute the logits without noise, (W φ + b) / τ, [..., K], of features [..., D]."""
        return self._over_temperature(self._affine()(features))

    def _over_temperature(self, logits: Tensor) -> Tensor:
        temperature = self.temperature()
        return logits if isinstance(temperature, float) and temperature == 1 else logits / temperature

    def layer(self, fold: bool = True) -> nn.Linear | nn.Conv2d:
        """Return the deterministic layer with these parameters, by reference.

        With `fold`, weight and bias are divided by τ in place, so that the layer's softmax is that of the head without
        noise.
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
    """Return the class of a head that replaces a layer, such as HetXLLayer for HetXLHead."""
    entries = {"__module__": __name__, "__doc__": f"A `{head.__name__}` that replaces a layer."}
    return type(head.__name__.replace("Head", "Layer"), (HeadLayer, head), entries)


LAYERS: dict[str, type[HeadLayer]] = {name: _layer_class(head) for name, head in HEADS.items()}
"""Classes by the names of `hetxl.nn.HEADS`."""
globals().update({layer.__name__: layer for layer in LAYERS.values()})  # pickle finds a class by its name


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the hooks that users registered; their handles still remove them."""
    for name in _HOOKS:
        if name in old.__dict__:
            # Move the dictionary itself, because handles refer to it.
            new.__dict__[name] = old.__dict__[name]
            old.__dict__[name] = type(old.__dict__[name])() if isinstance(old.__dict__[name], dict) else None
