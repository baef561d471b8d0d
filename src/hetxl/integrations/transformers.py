"""Models of transformers: labels go to the head's fused loss, and configurations remember the head.

    from hetxl.integrations.transformers import from_pretrained

    model = hetxl.convert(AutoModelForImageClassification.from_pretrained(...))
    Trainer(model, ...).train()
    model.save_pretrained("there")
    model = from_pretrained("there")

A directory that was saved opens with transformers alone, too: as the deterministic model with the same weights.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import nn

from hetxl.functional import IGNORE_INDEX
from hetxl.integrations.adapt import Adapted, adapted_class, restored_options, stored_options
from hetxl.integrations.find import replace
from hetxl.integrations.install import install
from hetxl.integrations.layer import HeadLayer, move_hooks
from hetxl.integrations.transformers_loss import check_one_class, labels_loss

TASKS = (
    "ForImageClassification",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForAudioClassification",
    "ForVideoClassification",
    "ForCausalLM",
    "ForMaskedLM",
    "LMHeadModel",
)
"""Endings of the classes whose outputs are one distribution over classes for each row of logits."""
SHIFTED = ("ForCausalLM", "LMHeadModel")
"""Those whose row t is a prediction of label t + 1."""
HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that say where files are, and so are the configuration's too."""


class TransformersAdapter(Adapted):
    """A model of transformers with a head.

    Given labels, it computes the head's fused loss, in training without any logits (`output.logits` is None then). In
    evaluation mode, and without labels, `output.logits` are log-probabilities averaged over the noise.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        """As the model's own class makes it, then with the head that the configuration remembers."""
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        assert isinstance(self, nn.Module)
        record = restored_options(config.hetxl)
        install(self, TransformersAdapter, record.pop("head"), record.pop("layer"), record)

    @classmethod
    def hetxl_checked(cls, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Refuses models of other tasks and regressions; several labels for an example make the link sigmoid."""
        name = type(model).__name__
        if not name.endswith(TASKS):
            raise ValueError(
                f"model {name} does not give one distribution over classes: classes that end in {', '.join(TASKS)} "
                "can be converted"
            )
        config: Any = model.config
        if not name.endswith((*SHIFTED, "ForMaskedLM")):
            if config.problem_type == "regression" or config.num_labels == 1:
                raise ValueError(f"model {name} has one output, a regression; classes need num_labels of 2 or more")
            several = config.problem_type == "multi_label_classification"
            if several:
                options.setdefault("link", "sigmoid")
            link = options.get("link", "softmax")
            if several != (link == "sigmoid") and config.problem_type is not None:
                raise ValueError(f"link={link!r} does not fit config.problem_type={config.problem_type!r}")
        stored_options(options)
        return options

    @classmethod
    def hetxl_forward(cls, base: type) -> Callable:
        """The model's forward with the head's loss; of the same signature, which Trainer reads."""
        own: Any = base
        signature = inspect.signature(own.forward)
        shifted = base.__name__.endswith(SHIFTED)

        @functools.wraps(own.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            head = _head(self)
            if head.capturing:
                return own.forward(self, *args, **kwargs)
            given = signature.bind(self, *args, **kwargs)
            extra = given.arguments.get("kwargs", {})
            labels = given.arguments.pop("labels", None)
            count = extra.pop("num_items_in_batch", None)
            moved = extra.pop("shift_labels", None)
            as_tuple = given.arguments.pop("return_dict", extra.pop("return_dict", self.config.return_dict)) is False
            with head.capture() as captured:
                output = own.forward(*given.args, **given.kwargs, return_dict=True)
            rows = captured.rows(output.logits[..., 0])
            if moved is not None:
                labels = moved
            elif labels is not None and shifted:
                labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
            chosen = "link" in self.hetxl_options or self.config.problem_type == "single_label_classification"
            if labels is not None and not chosen:
                check_one_class(labels, head.num_classes)
            logits = head(rows, rows=True) if labels is None or not self.training else None
            loss = None if labels is None else labels_loss(head, rows, logits, labels.to(rows.device), count)
            # Made anew: an output keeps its fields in the order in which they were set.
            fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
            output = type(output)(**fields | {"loss": loss, "logits": logits})
            return output.to_tuple() if as_tuple else output

        return forward

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As of transformers. A head over the tokens keeps its noise, which new tokens take part in."""
        model: Any = self
        base: Any = super()
        head = _head(model)
        if model.get_output_embeddings() is not head:
            return base.resize_token_embeddings(*args, **kwargs)
        if not head.takes_any_classes:
            raise ValueError(
                f"the noise of {type(head).__name__} was made for {head.num_classes} tokens; "
                "resize before hetxl.convert(model)"
            )
        # What transformers resizes is a linear layer.
        layer = head.layer(fold=False)
        replace(model, head, layer)
        try:
            return base.resize_token_embeddings(*args, **kwargs)
        finally:
            move_hooks(layer, head)
            resized = model.get_output_embeddings()
            head.take(resized)
            replace(model, resized, head)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As of transformers; the configuration remembers what the head was rescaled by since it was made."""
        model: Any = self
        base: Any = super()
        head = _head(model)
        self.hetxl_options |= {"temperature": head.temperature, "noise_scale": head.noise_scale}
        self.hetxl_converted()
        return base.save_pretrained(*args, **kwargs)

    def hetxl_converted(self) -> None:
        """The configuration remembers the head."""
        model: Any = self
        model.config.hetxl = stored_options(self.hetxl_options)

    def hetxl_reverted(self) -> None:
        """The configuration forgets it."""
        model: Any = self
        del model.config.hetxl


def from_pretrained(path: str | Path, **kwargs: Any) -> Any:
    """A converted model that was saved with `save_pretrained`.

    Args:
        path: the directory, or the name of a repository.
        **kwargs: as of transformers' `from_pretrained`.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("models of transformers need it: pip install transformers accelerate") from None
    config = kwargs.get("config")
    if config is None or isinstance(config, str | Path):
        # Read for the class to make; that reads it again, with all that changes it.
        places = {name: kwargs[name] for name in HUB if name in kwargs}
        config = transformers.AutoConfig.from_pretrained(config or path, **places)
    if getattr(config, "hetxl", None) is None:
        raise ValueError(
            f"{path} was saved without a head of hetxl; load it with transformers, then hetxl.convert(model)"
        )
    name = (config.architectures or ["model without a class"])[0]
    base = getattr(transformers, name, None)
    if base is None:
        raise ValueError(f"{path} holds a {name}, which this transformers does not know")
    made: Any = adapted_class(base, TransformersAdapter)
    return made.from_pretrained(path, **kwargs)


def _head(model: nn.Module) -> HeadLayer:
    layer = model.get_submodule(model.hetxl_options["layer"])  # pyright: ignore[reportIndexIssue, reportArgumentType]
    assert isinstance(layer, HeadLayer)
    return layer
