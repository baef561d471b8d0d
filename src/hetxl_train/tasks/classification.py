"""Classification: a backbone with a head, trained on labelled rows."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn, optim

from hetxl._files import read_json, write_checked
from hetxl._seeds import derive_seed
from hetxl._tensors import read_tensors, write_tensors
from hetxl.functional import LabelLists, plan
from hetxl.metrics.records import NotFiniteError
from hetxl.metrics.scaling import NOISE_SCALES
from hetxl.metrics.summary import reliability, risk_coverage, summarise
from hetxl.optim import Penalty, add_prior, noise_free_steps, parameter_groups, prior_penalties, start_bias
from hetxl.registry import head_entry
from hetxl_train.backbones import layer_depths
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data import Description, describe
from hetxl_train.data.dataset import Dataset, Fetched, Split
from hetxl_train.data.fingerprint import fingerprint
from hetxl_train.data.label_noise import NoisySplit
from hetxl_train.data.open import open_data
from hetxl_train.defaults import Fitted, fitted_defaults, has_prior, measure_features, with_defaults
from hetxl_train.distributed import World
from hetxl_train.estimate import Activations, Estimate, measuring, now, weight_memory
from hetxl_train.evaluate import Evaluation, evaluate_split
from hetxl_train.examples import confused_examples, extreme_examples
from hetxl_train.loaders import Order, Parts, to_device
from hetxl_train.mixing import mixed
from hetxl_train.model import Model, answers_of, build_model, cached_features, link_of, parameter_counts
from hetxl_train.num_steps import describe_length, steps_for
from hetxl_train.parallel import by_division, load_state, local, number, prepare, sharing_classes, whole_on_main
from hetxl_train.start_from import Start, start_weights
from hetxl_train.tasks import Loss, Task
from hetxl_train.temperature.hypergradient import Batch
from hetxl_train.temperature.policy import recommend_for
from hetxl_train.temperature.rules import (
    TemperatureRule,
    add_temperature_prior,
    build_rule,
    freeze,
    held_out_examples,
    is_frozen,
    reset_state,
)

NOISE_FREE, NOISE_FREE_LOSS = "noise_free.safetensors", "noise_free.json"
"""Files with the head before its noise was switched on, and with its validation NLL."""


class ClassificationTask(Task[TrainConfig, Dataset, Model]):
    """Train a head and its backbone; the features of a frozen backbone are cached in the directory."""

    monitor: ClassVar[str | None] = "nll"

    def __init__(
        self, config: TrainConfig, dataset: Dataset, world: World, console: Console, directory: Path,
        description: Description | None = None,
    ):  # fmt: skip
        world = sharing_classes(world, config)
        super().__init__(config, dataset, world)
        if config.temperature == "auto":
            recommendation = recommend_for(config, dataset)
            if recommendation.learned:
                console.say(f"τ is learned: {recommendation.reason}")
            config = dataclasses.replace(config, temperature="learned" if recommendation.learned else "1.0")
        prior, config = has_prior(config, dataset.input), with_defaults(config, dataset.input)
        self.config, self.directory = config, directory
        self.description = description
        self.link = link_of(config, dataset)
        mixing = {"mixup": config.mixup, "cutmix": config.cutmix}
        self.mixing = {name: alpha for name, alpha in mixing.items() if alpha}
        if self.mixing and dataset.input.kind != "image":
            raise ValueError(f"{min(self.mixing)} is for images, but this data is {dataset.input.kind}; leave it out")
        self.steps = steps_for(config, dataset)
        self.noise_free = noise_free_steps(self.steps, config.optim)  # number of first steps without noise
        mesh = None if world.mesh is None else world.mesh["classes"]
        self.whole = self.model = build_model(config, dataset.input, dataset.num_classes, self.link, mesh)
        self.start_point: Start | None = None
        if config.start_from is not None:
            self.start_point = start_weights(self.model, config, dataset.class_names, self.link)
            console.say(f"Starting from {self.start_point.text}")
        self.model.to(world.device)
        self.model.backbone = prepare(self.model.backbone, config, world)
        self.counts = dataset.splits["train"].labels.counts(dataset.num_classes)
        self.splits = dataset.splits
        if config.frozen and config.backbone not in ("auto", "none"):
            folder = directory / "features"
            self.model, self.splits = cached_features(folder, self.model, dataset, config.workers, console, world)
        self.split = self.splits["train"]
        self.penalties: list[Penalty] = []
        if prior and config.data_parallel == "fsdp" and world.processes > 1:
            raise ValueError(
                "data_parallel = fsdp is for a network that is trained; with a head alone use data_parallel = ddp"
            )
        self.fitted = self._start(prior)
        self.order = Order(len(self.split), derive_seed(config.seed, 12))
        parts = config.accumulate * world.replicas.processes
        self.examples = config.batch_size - held_out_examples(config, parts) * parts
        self.rule: TemperatureRule | None = None
        self.optimizer: optim.Optimizer | None = None
        self.trained_on: partial[None] | None = None  # passes the last part of the batch to the rule
        self.noise_kept = True  # False if the head without noise has the lower validation NLL
        self.validated: dict[str, Any] | None = None  # the last validation metrics

    def _start(self, has_prior: bool) -> Fitted | None:
        """Measure the features, initialise the bias of the sigmoid link, and set the head's prior and ε, if any.

        A head from `start_from` already has its bias and the scale of its features.
        """
        config, head, start = self.config, self.model.head, self.start_point
        bias = getattr(head.classifier, "bias", None)
        trained = start is not None and start.head
        if self.link == "sigmoid" and config.bias_init is None and bias is not None and not trained:
            classes = getattr(head.classifier, "classes", range(len(self.counts)))  # those of this process
            start_bias(local(bias), torch.as_tensor(self.counts)[classes.start : classes.stop], len(self.split))
        measured = start is None or (head.standardize is not None and not trained)
        if measured:
            measure_features(self.model, self.split)
        if not has_prior:
            return None
        stored = self.directory / "model.json"
        before = read_json(stored, dict) if stored.exists() else {}
        if before.get("prior") is None:
            sizes = (self.dataset.num_classes, self.link, self.steps)
            fitted = self.world.on_main(
                lambda: fitted_defaults(config, self.model, self.splits, *sizes, measured=measured)
            )
        else:
            fitted = Fitted(before["prior"], before.get("flip_rate", 0.0), before.get("deviation"))
        if fitted.deviation is not None and head.standardize is not None:
            head.standardize.share(fitted.deviation)
        head.flip_rate = fitted.flip_rate
        self.penalties = prior_penalties(head, fitted.prior, len(self.split))
        return fitted

    open = staticmethod(open_data)

    @staticmethod
    def announce(config: TrainConfig, dataset: Dataset, console: Console) -> Description:
        """Print a description of the data and the length of the run."""
        description = describe(dataset)
        console.rich.print(description)
        if "train" in dataset.splits:
            console.say(describe_length(config, dataset))
        return description

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the recipe."""
        depths = layer_depths(self.model.backbone) if self.config.layer_decay != 1 else {}
        named = {f"backbone.{name}": depth for name, depth in depths.items()}
        groups = parameter_groups(self.model, self.config.optim, named)
        return by_division(groups, "head.classifier.") if self.config.classifier == "sharded" else groups

    def start(self, optimizer: optim.Optimizer, parts: Parts) -> None:
        """Build the rule that updates a learned τ."""
        self.optimizer = optimizer
        self.rule = build_rule(self.config, self.model, optimizer, self.splits.get("validation"), parts, self.world)

    def loss(self, called: nn.Module, fetched: Fetched, targets: Any, step: int, part: int) -> Loss:
        """Return the sum of the losses of a part."""
        inputs, smoothing = fetched.inputs, self.config.label_smoothing
        if self.rule is not None:
            inputs, targets = self.rule.validation.divide(fetched, self.split)
        inputs = inputs.to(self.device, non_blocking=True)
        targets = to_device(targets, self.device)
        if self.mixing and len(inputs):
            rng = np.random.default_rng(derive_seed(self.config.seed, step, part, 27))
            inputs, targets = mixed(inputs, targets, self.dataset.num_classes, rng, **self.mixing)
        generator = self._seed(step, part)
        options: dict[str, Any] = {"label_smoothing": smoothing} if smoothing else {}
        if step < self.noise_free:
            # One draw of zeros: the noise has gradients of 0. With several processes, all parameters need gradients.
            assert self.model.head.covariance is not None
            options["noise"] = torch.zeros(1, self.model.head.covariance.size, device=self.device)
        else:
            options["generator"] = generator
        loss = called(inputs, targets, reduction="sum", **options)
        if self.rule is not None:
            self.trained_on = partial(self.rule.see, Batch(inputs, targets), partial(self._seed, step, part))
        return Loss(loss, len(inputs))

    def after_backward(self) -> None:
        """Pass the last part of the batch to the rule."""
        if self.trained_on is not None:
            self.trained_on()

    def before_step(self, step: int, examples: int) -> None:
        """Set the gradient of τ by the rule, or add that of its prior; set it to 0 while τ is frozen."""
        if self.rule is not None:
            self.rule.before_step(step, examples)
        elif self.config.temperature_prior:
            add_temperature_prior(self.model.head.temperature, self.config.temperature_prior)
        if is_frozen(step, self.steps, self.config):
            freeze(self.model.head.temperature)
        add_prior(self.penalties, noise=step >= self.noise_free)

    def clipped(self, norm: Tensor) -> None:
        """Pass the norm on to the rule."""
        if self.rule is not None:
            self.rule.clipped(norm)

    def after_step(self, step: int) -> None:
        """Update τ by the rule, and reset the optimiser's state of a frozen τ."""
        frozen = is_frozen(step, self.steps, self.config)
        if self.rule is not None:
            self.rule.after_step(step, moves=not frozen)
        if frozen and self.optimizer is not None:
            reset_state(self.model.head.temperature, self.optimizer)
        # If the backbone is trained, its features change, and the head of an earlier step no longer fits them.
        alone = not any(parameter.requires_grad for parameter in self.model.backbone.parameters())
        if step + 1 == self.noise_free and alone and "validation" in self.splits:
            self._keep_noise_free()

    def _keep_noise_free(self) -> None:
        """Save the head before its noise is switched on, with its validation NLL."""
        head = self.model.head
        self.model.eval()
        scale, head.noise_scale = head.noise_scale, 0.0
        try:
            loss = self._summary(self._evaluate("validation", self.config.evaluation_examples))["nll"]
        except NotFiniteError:
            loss = math.inf
        head.noise_scale = scale
        self.model.train()
        if loss is None or not math.isfinite(loss):
            return  # there is no loss to compare with; the loop raises at its next loss
        state = whole_on_main(self.model.head.state_dict(), self.world)
        if self.world.is_main:
            write_tensors(self.directory / NOISE_FREE, state)
            write_checked(self.directory / NOISE_FREE_LOSS, {"nll": loss, "step": self.noise_free})
        self.world.wait()

    def choose_weights(self) -> None:
        """Undo what raises the validation NLL of the head: all of its noise, some of it, or ε of flipped labels."""
        head = self.model.head
        if "validation" not in self.splits:
            return
        if self.validated is None or self.config.patience:  # the weights may differ from those last validated
            self.validate()
        if head.covariance is not None and (self.directory / NOISE_FREE).exists():
            before = read_json(self.directory / NOISE_FREE_LOSS)["nll"]
            if self.validated is None or before < self.validated["nll"]:
                load_state(head, read_tensors(self.directory / NOISE_FREE).tensors)
                head.covariance.silence()
                self.noise_kept, self.validated = False, None
        elif head.covariance is not None and self.config.noise_scale is None:
            self._lower("noise_scale", [scale for scale in reversed(NOISE_SCALES) if scale < 1])
        if head.flip_rate and self.config.flip_rate is None:
            self._lower("flip_rate", [0.0])

    def _lower(self, name: str, values: Sequence[float]) -> None:
        """Set an option of the head to one value after the other, as long as each lowers the validation NLL."""
        for value in values:
            if self.validated is None:
                self.validate()
            chosen, metrics = getattr(self.model.head, name), self.validated
            setattr(self.model.head, name, value)
            self.validate()
            if metrics is not None and (self.validated is None or self.validated["nll"] >= metrics["nll"]):
                setattr(self.model.head, name, chosen)
                self.validated = metrics
                return

    def _seed(self, step: int, part: int) -> torch.Generator:
        """Seed all generators for a part of a batch; return the generator of the noise."""
        torch.manual_seed(derive_seed(self.config.seed, step, part, 14))  # dropout and the like
        return self.noise.manual_seed(derive_seed(self.config.seed, step, part, 13))

    @torch.no_grad()
    def status(self) -> dict[str, float]:
        """Return τ."""
        return {"temperature": number(self.model.head.temperature)}

    def validate(self) -> dict[str, Any]:
        """Return metrics on the validation split, or without one on the training split."""
        try:
            evaluation = self._evaluate(self.validation, self.config.evaluation_examples)
        except NotFiniteError:
            return {"nll": math.nan}
        self.validated = self._summary(evaluation)
        return {"split": self.validation} | {key: value for key, value in self.validated.items() if value is not None}

    def _summary(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return the metrics of an evaluation in all processes; only the main process has its records."""
        return self.world.on_main(lambda: summarise(evaluation.records, self.counts))

    def _evaluate(self, name: str, limit: int, confusions: bool = False) -> Evaluation:
        options = {"class_names": self.dataset.class_names, "seed": derive_seed(self.config.seed, 15)}
        options |= {"limit": limit, "workers": self.config.workers, "confusions": confusions, "quiet": not confusions}
        options |= {"precision": self.config.evaluation_precision, "world": self.world}
        return evaluate_split(self.model, self.splits[name], **options)

    def estimate(self, parts: Parts) -> Estimate | None:
        """Estimate time and memory from the first part of the first step."""
        return estimate_on(self.config, self.model, self.split, parts, self.steps, self.device)

    def describe(self) -> dict[str, Any]:
        """Return the input, the link, τ as decided, the classes and the fingerprint of the data."""
        return {
            "input": dataclasses.asdict(self.dataset.input),
            "link": self.link,
            "temperature": self.config.temperature,
            "prior": None if self.fitted is None else self.fitted.prior,
            "flip_rate": self.model.head.flip_rate if self.fitted is None else self.fitted.flip_rate,
            "deviation": None if self.fitted is None else self.fitted.deviation,
            "answers": answers_of(self.whole),
            "dataset": self.dataset.name,
            "class_names": list(self.dataset.class_names),
            "class_counts": self.counts.tolist(),
            "data": fingerprint(self.dataset),
        }

    def write_data(self, directory: Path) -> None:
        """Write which labels were replaced."""
        split = self.dataset.splits["train"]
        if isinstance(split, NoisySplit):
            split.noise.save(directory / "label_noise.npz")

    def result(self, directory: Path, *, stopped: bool, validate: bool) -> dict[str, Any]:
        """Evaluate on the first of the test, validation and training splits that the data has."""
        metrics: dict[str, Any] = {}
        if "validation" in self.splits:
            if validate or self.validated is None:
                self.validate()
            metrics["validation"] = self.validated
        name = next(name for name in ("test", "validation", "train") if name in self.splits)
        evaluation = self._evaluate(name, self.config.test_examples, confusions=True)
        # Records count the rows of the evaluated splits, which may be files of features.
        shown = dataclasses.replace(self.dataset, splits=self.splits)
        metrics[name] = self.world.on_main(
            lambda: write_evaluation(directory, evaluation, shown, name, np.asarray(self.counts))
        )
        return {
            **result_of(self.whole, self.dataset, metrics, evaluation),
            "data": {} if self.description is None else self.description.as_dict(),
            "stopped_early": stopped,
            "noise_kept": self.noise_kept,
            "derived_from": None,
        }

    @staticmethod
    def summary(result: dict[str, Any]) -> str:
        """Describe NLL, accuracy and calibration error."""
        name, metrics = next(reversed(result["metrics"].items()))
        accuracy = f"accuracy {metrics['precision@1']:.1%}, calibration error {metrics['calibration_error']:.1%}"
        return f"{name} NLL {metrics['nll']:.3f}, {accuracy}"


def estimate_on(
    config: TrainConfig, model: Model, split: Split, parts: Parts, steps: int, device: torch.device
) -> Estimate | None:
    """Estimate a run on the first part of its first step; None if none of its rows can be read."""
    rows, seeds = Order(len(split), derive_seed(config.seed, 12)).of(*parts.places(0, 0))
    fetched = split.fetch(rows, seeds)
    if not len(fetched.rows):
        return None
    targets = to_device(split.labels.take(fetched.rows), device)
    return estimate(config, model, fetched.inputs.to(device), targets, steps, parts.accumulate)


def estimate(
    config: TrainConfig, model: Model, inputs: Tensor, targets: Tensor | LabelLists, steps: int, parts: int = 1
) -> Estimate:
    """Measure the time of one part of a step, and compute the memory of the run. The model does not change.

    Inputs [b, ...] and targets are those of one part; `parts` is the number of parts of a step in this process.
    """
    device, seconds, head_seconds = inputs.device, 0.0, 0.0
    options: dict[str, Any] = {"reduction": "sum", "generator": torch.Generator(device).manual_seed(0)}
    activations = Activations(model)
    with measuring(model):
        for _ in range(2):  # the first iteration warms up
            begin = now(device)
            with activations.counting():
                features = model.backbone(inputs)
            leaf = features.detach().requires_grad_()
            middle = now(device)
            model.head(leaf, targets, **options).backward()
            end = now(device)
            if features.requires_grad:
                features.backward(leaf.grad)
            seconds, head_seconds = now(device) - begin, end - middle
    memory = weight_memory(model)
    memory["the moving average"] = memory["their gradients"] if config.ema else 0
    head: Any = model.head
    noise = (0, 0) if head.covariance is None else (head.covariance.noise_features, head.covariance.size)
    lift, sizes = head_entry(config.head).lift, (len(inputs), head.in_features, head.num_classes)
    blocks = plan(*sizes, *noise, config.train_samples, device=device, link=head.link, lift=lift)
    memory["the head's blocks"] = blocks.bytes
    memory["the backbone's activations"] = activations.bytes
    return Estimate(memory, seconds * parts, steps, head_seconds / seconds)


def write_evaluation(
    directory: Path, evaluation: Evaluation, dataset: Dataset, split: str, class_counts: np.ndarray | None
) -> dict[str, float | None]:
    """Write records, curves, confusions and examples of an evaluation; return its metrics."""
    records = evaluation.records
    (directory / "records").mkdir(exist_ok=True)
    records.save(directory / "records" / f"{split}.safetensors")
    risks = [[float(x), float(y)] for x, y in zip(*risk_coverage(records), strict=True)]
    points = [list(point) for point in reliability(records)]
    write_checked(directory / "curves.json", {"split": split, "reliability": points, "risk_coverage": risks})
    write_checked(directory / "confusions.json", {"pairs": evaluation.pairs})
    shown: dict[str, Any] = {**extreme_examples(records, dataset.splits[split], dataset.class_names)}
    shown["confused"] = confused_examples(records, dataset.splits[split], dataset.class_names, evaluation.pairs)
    write_checked(directory / "examples.json", shown)
    return summarise(records, class_counts)


@torch.no_grad()
def result_of(model: Model, dataset: Dataset, metrics: dict[str, Any], evaluation: Evaluation) -> dict[str, Any]:
    """Return the entries of result.json for a model and its evaluation."""
    return {
        "dataset": dataset.name,
        "parameters": parameter_counts(model, "head", "backbone"),
        "metrics": metrics,
        "predict_seconds_per_1000": 1000 * evaluation.seconds / max(len(evaluation.records), 1),
        "temperature": float(model.head.temperature()),
        "noise_scale": model.head.noise_scale,
        "flip_rate": model.head.flip_rate,
        "best_nll": dataset.best_nll,
        "broken": [list(item) for item in evaluation.unreadable[:100]],
    }
