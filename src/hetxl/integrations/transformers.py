"""Models of transformers: labels use the head's fused loss, and the configuration stores the head.

    from hetxl.integrations.transformers import from_pretrained

    model = hetxl.convert(AutoModelForImageClassification.from_pretrained(...))
    Trainer(model, ...).train()
    model.save_pretrained("there")
    model = from_pretrained("there")

transformers without hetxl can also load a saved directory, as the deterministic model with the same weights.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetxl._checks import needing, one_of
from hetxl.functional import IGNORE_INDEX
from hetxl.integrations.convert import head_of, install, predict
from hetxl.integrations.convert.adapter import Adapted, adapted_class, restored_options, stored_options
from hetxl.integrations.convert.layer import HeadLayer, move_hooks
from hetxl.integrations.convert.locate import replace
from hetxl.integrations.convert.peft import called_module

TASKS = (
    *(f"For{kind}Classification" for kind in ("Image", "Sequence", "Token", "Audio", "Video")),
    *("ForCausalLM", "ForMaskedLM", "LMHeadModel"),
)
"""Suffixes of model classes whose logits are one distribution over classes per row."""
SHIFTED = ("ForCausalLM", "LMHeadModel")
"""Suffixes of model classes whose row t predicts label t + 1."""
HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that locate files, and also apply to the configuration."""


class TransformersAdapter(Adapted):
    """A model of transformers with a head.

    With labels, it computes the head's fused loss, in training without logits (`output.logits` is None unless the head
    has `train_logits`). In evaluation mode, and without labels, `output.logits` are log-probabilities averaged over the
    noise.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        """Create the original model, then add the head that the configuration stores."""
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        assert isinstance(self, nn.Module)
        record = restored_options(config.hetxl)
        install(self, TransformersAdapter, record.pop("head"), record.pop("layer"), record)

    @classmethod
    def hetxl_checked(cls, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Raise for other tasks and for regression; several labels per example select the sigmoid link."""
        name = type(model).__name__
        if not name.endswith(TASKS):
            raise ValueError(
                f"model {name} does not return one distribution over classes; supported models end in "
                f"{', '.join(TASKS)}"
            )
        config: Any = model.config
        if not name.endswith((*SHIFTED, "ForMaskedLM")):
            if config.problem_type == "regression" or config.num_labels == 1:
                raise ValueError(f"model {name} has one output (regression); set num_labels to 2 or more")
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
        """Return the model's forward with the head's loss, and the same signature, which Trainer reads."""
        own: Any = base
        signature = inspect.signature(own.forward)
        shifted = base.__name__.endswith(SHIFTED)

        @functools.wraps(own.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            head = called_head(self)
            if head is None or head.capturing:  # None if PEFT has disabled its adapters and the head
                return own.forward(self, *args, **kwargs)
            bound = signature.bind(self, *args, **kwargs)
            extra = bound.arguments.get("kwargs", {})
            labels = bound.arguments.pop("labels", None)
            count = extra.pop("num_items_in_batch", None)
            moved = extra.pop("shift_labels", None)
            as_tuple = bound.arguments.pop("return_dict", extra.pop("return_dict", self.config.return_dict)) is False
            with head.capture() as captured:
                output = own.forward(*bound.args, **bound.kwargs, return_dict=True)
            rows = captured.rows(output.logits[..., 0])
            if moved is not None:
                labels = moved
            elif labels is not None and shifted:
                labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
            chosen = "link" in self.hetxl_options or self.config.problem_type == "single_label_classification"
            if labels is not None and not chosen:
                check_one_class(labels, head.num_classes)
            asked = labels is None or not self.training or head.train_logits
            logits = head(rows, rows=True) if asked else None
            loss = None if labels is None else labels_loss(head, rows, logits, labels.to(rows.device), count)
            # Created again, because an output keeps its fields in the order of assignment.
            fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
            output = type(output)(**fields | {"loss": loss, "logits": logits})
            return output.to_tuple() if as_tuple else output

        return forward

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Resize like transformers. A head over the tokens keeps its noise, which also applies to new tokens."""
        model: Any = self
        base: Any = super()
        head = head_of(model)
        if model.get_output_embeddings() is not head:
            return base.resize_token_embeddings(*args, **kwargs)
        if not head.takes_any_classes:
            raise ValueError(
                f"the noise of {type(head).__name__} was made for {head.num_classes} tokens; "
                "resize before hetxl.convert(model)"
            )
        # transformers resizes only a linear layer.
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
        """Save like transformers; the configuration includes the current scales of the head."""
        model: Any = self
        base: Any = super()
        head = head_of(model)
        names = ("temperature", "noise_scale", "flip_rate", "eval_seed")
        self.hetxl_options |= {name: getattr(head, name) for name in names}
        self.hetxl_converted()
        return base.save_pretrained(*args, **kwargs)

    def hetxl_converted(self) -> None:
        """Store the head in the configuration."""
        model: Any = self
        model.config.hetxl = stored_options(self.hetxl_options)

    def hetxl_reverted(self) -> None:
        """Remove the head from the configuration."""
        model: Any = self
        del model.config.hetxl


def from_pretrained(path: str | Path, **kwargs: Any) -> Any:
    """Load a converted model that was saved with `save_pretrained`, from a directory or a repository.

    Options are those of transformers' `from_pretrained`.
    """
    with needing("models of transformers need transformers", "transformers accelerate"):
        import transformers
    config = kwargs.get("config")
    if config is None or isinstance(config, str | Path):
        # Read only to find the class, which reads the configuration again with all overrides.
        locations = {name: kwargs[name] for name in HUB if name in kwargs}
        config = transformers.AutoConfig.from_pretrained(config or path, **locations)
    if getattr(config, "hetxl", None) is None:
        raise ValueError(
            f"{path} was saved without a head of hetxl; load it with transformers, then hetxl.convert(model)"
        )
    name = (config.architectures or ["model without a class"])[0]
    base = getattr(transformers, name, None)
    if base is None:
        raise ValueError(f"{path} has a {name}, which the installed transformers does not have; upgrade it")
    adapted: Any = adapted_class(base, TransformersAdapter)
    return adapted.from_pretrained(path, **kwargs)


def called_head(model: nn.Module) -> HeadLayer | None:
    """Return the head that a model calls; None while PEFT's adapters are disabled and it calls the original layer."""
    options: Any = model.hetxl_options
    module = called_module(model.get_submodule(options["layer"]))
    return module if isinstance(module, HeadLayer) else None


class UncertainPipeline:
    """Mix-in for pipelines of transformers that adds the uncertainty to their results."""

    model: Any

    def _sanitize_parameters(self, return_uncertainty: bool | None = None, **options: Any) -> tuple[dict, dict, dict]:
        base: Any = super()
        before, forward, after = base._sanitize_parameters(**options)
        return before, forward if return_uncertainty is None else {"return_uncertainty": return_uncertainty}, after

    def _forward(self, model_inputs: Any, return_uncertainty: bool = False) -> Any:
        base: Any = super()
        if not return_uncertainty:
            return base._forward(model_inputs)
        from transformers.utils.generic import ModelOutput

        prediction = predict(self.model, model_inputs)
        logits = prediction.log_probs
        if head_of(self.model).link == "sigmoid":
            logits = logits - torch.log(-torch.expm1(logits))
        return ModelOutput(logits=logits, entropy=prediction.entropy, mutual_information=prediction.mutual_information)

    def postprocess(self, model_outputs: Any, **options: Any) -> Any:
        """Return the results of the pipeline, each with the entropy of its example and the part from noise."""
        base: Any = super()
        results = base.postprocess(model_outputs, **options)
        if "entropy" not in model_outputs:
            return results
        extra = {name: float(model_outputs[name][0]) for name in ("entropy", "mutual_information")}
        return results | extra if isinstance(results, dict) else [result | extra for result in results]


PIPELINES = {
    "text-classification": "TextClassificationPipeline",
    "sentiment-analysis": "TextClassificationPipeline",
    "image-classification": "ImageClassificationPipeline",
}
"""Pipeline classes of transformers by task."""


def pipeline(task: str, model: nn.Module | str | Path, **options: Any) -> Any:
    """Return a pipeline of transformers for a converted model, with the same options and calls.

    With `return_uncertainty=True`, here or in a call, each result has `entropy`, in nats, and `mutual_information`, the
    part that the noise explains. If `model` is a directory or a repository, `from_pretrained` loads it with its
    tokenizer or image processor.
    """
    import transformers

    one_of("task", task, PIPELINES)
    if isinstance(model, str | Path):
        options.setdefault("image_processor" if task.startswith("image") else "tokenizer", str(model))
        model = from_pretrained(model)
    assert isinstance(model, nn.Module)
    head_of(model)
    plain = getattr(transformers, PIPELINES[task])
    options["pipeline_class"] = type(plain.__name__, (UncertainPipeline, plain), {})
    make: Any = transformers.pipeline  # its type hints list only known tasks
    return make(task, model, **options)


ROW_SUM = 0.01
"""Maximum deviation from 1 of a row sum of class probabilities, for half precision."""


def check_one_class(labels: Tensor, num_classes: int) -> None:
    """Raise for rows [..., K] of several labels, which transformers would assume if nothing else is configured."""
    if not labels.is_floating_point() or labels.shape[-1:] != (num_classes,):
        return
    sums = labels.float().sum(-1)
    wrong = sums[(sums - 1).abs() > ROW_SUM]
    if len(wrong):
        raise ValueError(
            f"labels have a row that sums to {float(wrong[0]):g}, but class probabilities sum to 1. For several labels "
            'per example, set config.problem_type="multi_label_classification", or convert with '
            'hetxl.convert(model, link="sigmoid"). To train a softmax on them, use link="softmax"'
        )


def labels_loss(head: HeadLayer, rows: Tensor, outputs: Tensor | None, labels: Tensor, count: Any) -> Tensor:
    """Return the mean loss over the labels, or their sum divided by `count`; from the outputs if they exist.

    Args:
        outputs: outputs [..., K] of the head for rows [..., D], or None.
        labels: class ids [...], or a row per example, [..., K].
        count: number of label entries in all batches that a step accumulates, as Trainer counts; None for the mean.
    """
    reduction = "mean" if count is None else "sum"
    in_rows = labels.shape == (*rows.shape[:-1], head.num_classes)
    if in_rows and count is not None:
        count = count / head.num_classes  # a row is one label
    if outputs is None:
        total = head(rows, labels, rows=True, reduction=reduction)
    elif head.link == "softmax":
        flat = labels.flatten(0, -2).float() if in_rows else labels.flatten()
        total = F.cross_entropy(outputs.flatten(0, -2).float(), flat, reduction=reduction)
    else:
        total = F.binary_cross_entropy_with_logits(outputs.float(), labels.float(), reduction="none").sum(-1)
        total = total.mean() if count is None else total.sum()
    return total if count is None else total / torch.as_tensor(count, device=total.device)
