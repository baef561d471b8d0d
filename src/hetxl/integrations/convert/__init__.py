"""Replace a model's last layer by a head in one line, in place, and revert it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hetxl._checks import one_of
from hetxl.functional.targets import TargetsLike
from hetxl.integrations.convert.adapter import Adapted, adapted_class
from hetxl.integrations.convert.capture import logits_of
from hetxl.integrations.convert.layer import LAYERS, HeadLayer
from hetxl.integrations.convert.locate import find_layer, names_of, replace
from hetxl.integrations.convert.peft import base_model, hidden_modules, is_peft, merged_name
from hetxl.integrations.convert.trained import add_noise as add_noise
from hetxl.nn import HEADS, Prediction

WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}
"""Wrapper classes of torch that synchronise only parameters that exist when the model is wrapped."""


def convert(model: nn.Module, head: str = "het-xl", *, layer: str | nn.Module | None = None, **options: Any) -> Any:
    """Replace a model's last layer by a head, in place, keeping its weights.

    The parameters keep their names, dtype, device, tying and `requires_grad`, and the layer keeps its hooks. The
    output becomes log-probabilities averaged over the noise, which cross-entropy and softmax accept like logits:

    >>> model = convert(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 100)))
    >>> model(torch.randn(4, 8)).exp().sum(-1).allclose(torch.ones(4))
    True

    `fused_loss(model, inputs, targets)` trains with less memory; `predict(model, inputs)` returns probabilities with
    their uncertainty. Models of transformers use the fused loss automatically when they get labels.

    Args:
        model: any module. In models of timm and transformers, also with PEFT, the classifier is converted; in others
            the last linear layer.
        head: "het-xl", "het", "het-h" or "det".
        layer: name of the layer, such as "head.fc", if the model is ambiguous.
        **options: options of the head (`hetxl.HetXLHead`), such as rank, link, train_samples, temperature.
            `eval_method`, a `method` of `head.predict`, sets how outputs are averaged in evaluation mode.
            `train_logits=True` makes models of transformers return `logits` in training.

    Returns:
        The model, or the new head if the model is itself the layer.
    """
    one_of("head", head, HEADS)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, found {type(model).__name__}")
    for kind in (base for module in model.modules() for base in type(module).__mro__):
        if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
            wrapper = WRAPPERS[kind.__name__]
            raise ValueError(
                f"model is wrapped by {wrapper}, which would not synchronise the parameters of the head; "
                f"convert the model before you wrap it, as in {wrapper}(hetxl.convert(model))"
            )
    names = [name for name, module in model.named_modules() if isinstance(module, HeadLayer)]
    if names:
        raise ValueError(f"model already has a converted layer ({', '.join(names)}); call hetxl.revert(model) first")
    inner = base_model(model)
    if isinstance(layer, str) and inner is not model:
        layer = layer.removeprefix("base_model.model.")  # prefix of names from the wrapper's named_modules()
    converted = install(inner, _adapter_of(inner), head, layer, options)
    return model if inner is not model else converted


def install(
    model: nn.Module, adapter: type[Adapted] | None, head: str, layer: str | nn.Module | None, options: dict[str, Any]
) -> Any:
    """Replace a layer of a model in place, and mix an adapter into the model's class, if any."""
    if adapter is not None:
        options = adapter.hetxl_checked(model, dict(options))
    old = find_layer(model, layer)
    new = LAYERS[head](old, **options)
    if model is old:
        return new
    names = replace(model, old, new)
    if adapter is not None:
        if not isinstance(model, Adapted):
            model.__class__ = adapted_class(type(model), adapter)
        assert isinstance(model, Adapted)
        model.hetxl_options = {"head": head, "layer": merged_name(names[0]), **options}
        model.hetxl_converted()
    return model


def revert(model: nn.Module, *, fold: bool = True) -> Any:
    """Restore the deterministic layer of a converted model, in place.

    With `fold`, weight and bias are divided by τ, so that the probabilities are those of the head without noise.
    """
    if is_peft(model):
        raise ValueError(
            "model is wrapped by PEFT, which has copies of its head; revert the result of model.merge_and_unload()"
        )
    head = head_of(model)
    with torch.no_grad():
        temperature = float(head.temperature())
    if fold and temperature != 1:
        shared = [
            name
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter is head.weight and name not in {f"{at}.weight".lstrip(".") for at in names_of(model, head)}
        ]
        if shared:
            raise ValueError(
                f"τ is {temperature:.3g} and the layer's weight is tied to {', '.join(shared)}, which "
                "must not be divided by it; use revert(model, fold=False) and divide the logits by τ"
            )
    layer = head.layer(fold)
    if model is head:
        return layer
    replace(model, head, layer)
    if isinstance(model, Adapted):
        model.hetxl_reverted()
        model.__class__ = model.hetxl_base
        del model.hetxl_options
    return model


def head_of(model: nn.Module) -> HeadLayer:
    """Return the head of a converted model, also if it is wrapped by DistributedDataParallel, torch.compile or PEFT.

    If PEFT has several copies, this is the copy that the model calls.
    """
    heads = {id(module): module for module in model.modules() if isinstance(module, HeadLayer)}
    if len(heads) > 1:
        hidden = hidden_modules(model)
        heads = {key: module for key, module in heads.items() if module not in hidden}
    if len(heads) != 1:
        what = "no converted layer" if not heads else f"{len(heads)} converted layers"
        raise ValueError(f"model has {what}; call hetxl.convert(model) first")
    return next(iter(heads.values()))


def fused_loss(model: nn.Module, inputs: Any, targets: TargetsLike, **options: Any) -> Tensor:
    """Return the loss of a converted model without computing its [B, K] output.

    Equal to `cross_entropy(model(inputs), targets)`, with less memory.

    Args:
        inputs: inputs of the model: a tensor, or a tuple or mapping of arguments, such as the output of a tokenizer.
        targets: see `hetxl.HetXLHead`.
        **options: options of the head's loss, such as reduction, weight, label_smoothing, num_samples, generator.
    """
    if torch.is_grad_enabled() and any(
        isinstance(module, DistributedDataParallel) and module.find_unused_parameters for module in model.modules()
    ):
        raise ValueError(
            "fused_loss uses the head's parameters after the model's forward pass, so DistributedDataParallel("
            "find_unused_parameters=True) treats them as unused; wrap the model with find_unused_parameters=False"
        )
    features = features_of(model, inputs)
    return head_of(model)(features, targets, rows=True, **options)


def predict(model: nn.Module, inputs: Any, top_k: int | None = None, method: str = "mc", **options: Any) -> Prediction:
    """Return averaged probabilities of a converted model with their uncertainty, like `head.predict`.

    The mode of the model does not change. `inputs` are its inputs: a tensor, or a tuple or mapping of arguments, such
    as the output of a tokenizer or an image processor.
    """
    with torch.no_grad():
        features = features_of(model, inputs)
    return head_of(model).predict(features, top_k, method, **options)


def mean_logits(model: nn.Module, inputs: Any) -> Tensor:
    """Return the logits of a converted model without noise, [..., K]; initially the original model's output."""
    return head_of(model).mean_logits(features_of(model, inputs))


def features_of(model: nn.Module, inputs: Any) -> Tensor:
    """Return the inputs of the head of a converted model, one row [D] per row of the model's output.

    `inputs` are the inputs of the model: a tensor, or a tuple or mapping of arguments.
    """
    head = head_of(model)
    with head.capture() as captured:
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    return captured.rows_of(logits_of(output), head.num_classes)


def _adapter_of(model: nn.Module) -> type[Adapted] | None:
    """Return the adapter for a model, by its library, without importing that library."""
    bases = type(model).__mro__
    if any(base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers") for base in bases):
        from hetxl.integrations.transformers import TransformersAdapter

        return TransformersAdapter
    if all(callable(getattr(model, name, None)) for name in ("get_classifier", "reset_classifier")):
        from hetxl.integrations.timm import TimmAdapter

        return TimmAdapter
    return None
