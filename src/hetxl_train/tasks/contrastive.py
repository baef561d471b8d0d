"""Contrastive learning: train two towers on pairs of images and texts, and evaluate them by zero-shot classification,
retrieval in both directions and detection of swapped pairs."""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn, optim

from hetxl._files import write_checked
from hetxl._seeds import derive_seed
from hetxl.contrastive.retrieval import (
    auroc,
    log_prob_blocks,
    pair_distance,
    pair_noise,
    retrieval_recall,
    top_k,
    zero_shot_weights,
)
from hetxl.functional._torch import to_accumulation_dtype
from hetxl_train import towers
from hetxl_train.config import ContrastiveConfig
from hetxl_train.console import Console
from hetxl_train.data.dataset import Fetched
from hetxl_train.data.fingerprint import fingerprint
from hetxl_train.data.pairs import Pairs, PairSplit, Texts, open_pairs, swapped
from hetxl_train.distributed import World
from hetxl_train.estimate import Activations, Estimate, measuring, now, weight_memory
from hetxl_train.examples import image_of
from hetxl_train.loaders import Feed, Order, Parts
from hetxl_train.mapped_towers import map_images, map_texts
from hetxl_train.model import parameter_counts
from hetxl_train.parallel import autocast, number, prepare, whole
from hetxl_train.tasks import Loss, Task
from hetxl_train.towers import Embedded, Slopes, Specs, TextReader, TextTable, Tower, TwoTowers, transform_of

KS = (1, 5, 10)
TOP = (1, 5)
EXAMPLES = 24
"""Number of zero-shot examples in the report, first those with unseen names; other kinds show half as many pairs."""
SCORED, SHOWN = 8000, 1000
"""Maximal number of training pairs whose noise is scored: to evaluate the detection of swaps, and to show examples."""


class _Part(NamedTuple):
    """The readable pairs of a part of a batch."""

    inputs: torch.Tensor  # inputs of the image tower
    rows: np.ndarray  # [b], rows of the training pairs
    seeds: np.ndarray  # [b]
    places: np.ndarray  # [b], positions in the batch of all processes


class ContrastiveTask(Task[ContrastiveConfig, Pairs, TwoTowers]):
    """Train two towers on pairs, including swapped ones."""

    evaluations: ClassVar[int] = 5
    command: ClassVar[str] = "contrastive "

    def __init__(
        self, config: ContrastiveConfig, pairs: Pairs, world: World, console: Console, directory: Path,
        description: None = None,
    ):  # fmt: skip
        super().__init__(config, pairs, world)
        self.train_pairs = pairs.splits["train"]
        if len(self.train_pairs) < config.batch_size:
            raise ValueError(
                f"batch_size must be at most {len(self.train_pairs)}, the training pairs, found {config.batch_size}"
            )
        self.texts = TextReader.of(config)
        self.specs = Specs(pairs.image, self.texts.spec(pairs))
        self.steps = config.steps or max(1, round(config.epochs * len(self.train_pairs) / config.batch_size))
        self.whole = self.model = towers.build_towers(config, self.specs).to(world.device)
        self.model.image, self.model.text = (
            prepare(tower, config, world) for tower in (self.model.image, self.model.text)
        )
        self.pairs = self._map_towers(directory / "embeddings", console)
        self.train_pairs = self.pairs.splits["train"]
        # One process computes the loss of an evaluation, so it needs a model that gathers nothing from the others.
        self.alone = self.model
        if world.processes > 1:
            alone = towers.build_towers(config, self.specs, published=False, gather=False).to(world.device)
            self.alone = self._behind(alone)
        # One process computes the vectors of a locked encoder, and the others read them.
        self.table = world.main_first(lambda: self.texts.table(self.train_pairs.texts, config.prompts))
        self.split = self.train_pairs.images
        self.order = Order(len(self.train_pairs), derive_seed(config.seed, 23))

    def _map_towers(self, directory: Path, console: Console) -> Pairs:
        """Compute the vectors of mapped towers once; from then on the model is the rest of the towers."""
        config, pairs, world = self.config, self.dataset, self.world
        image, text = self._mapped()
        if image:
            network: Any = self.whole.image.body
            pairs = map_images(pairs, network, directory, config.workers, console, world)
        if text:
            network, splits = self.whole.text.body, list(pairs.splits.values())
            self.texts = map_texts(self.texts, splits, config.prompts, network, directory, console, world)
        self.model = self._behind(self.whole)
        return pairs

    def _mapped(self) -> tuple[bool, bool]:
        """Return whether the image tower and the text tower are mapped: their vectors are computed once."""
        text = self.specs.text is not None and self.specs.text.kind == "text"
        return (
            self.config.image_lock == "mapped" and self.specs.image.kind == "image",
            self.config.text_lock == "mapped" and text,
        )

    def _behind(self, model: TwoTowers) -> TwoTowers:
        """Return the towers without their mapped networks."""
        mapped = zip((model.image, model.text), self._mapped(), strict=True)
        image, text = (tower.behind() if once and isinstance(tower, Tower) else tower for tower, once in mapped)
        return model if (image, text) == (model.image, model.text) else TwoTowers(image, text, model.loss)

    @staticmethod
    def open(config: ContrastiveConfig) -> Pairs:
        """Open the pairs of a configuration, and swap texts if it requests that."""
        pairs = open_pairs(config.data, transform=transform_of(config), seed=config.data_seed)
        if not config.swap:
            return pairs
        if "train" not in pairs.splits:
            raise ValueError(f"data {config.data!r} has no training split to swap texts in")
        train = swapped(pairs.splits["train"], config.swap, config.swap_within, config.data_seed)
        assert train.swaps is not None
        count, within = len(train.swaps), ", within categories" if config.swap_within else ""
        note = (
            f"swapped texts: {count:,} of {len(train):,} training pairs ({count / len(train):.1%}){within}; validation "
            "and test are clean"
        )
        return dataclasses.replace(pairs, splits={**pairs.splits, "train": train}, notes=(*pairs.notes, note))

    @staticmethod
    def announce(config: ContrastiveConfig, pairs: Pairs, console: Console) -> None:
        """Print the number of pairs in each split."""
        rows = ", ".join(f"{len(split):,} {name}" for name, split in pairs.splits.items())
        console.say(f"{pairs.name}: {rows} pairs")

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return groups with separate learning rates for the noise and for the scale and bias of the logits.

        The scale and bias of the logits, biases and the gains of norms have no weight decay.
        """
        groups: dict[tuple[float, float], dict[str, Any]] = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            decay, scale = self.config.weight_decay if parameter.dim() > 1 else 0.0, 1.0
            if name.startswith(("loss.image_noise.", "loss.text_noise.")):
                scale = self.config.noise_learning_rate
            elif name.startswith("loss."):
                scale = self.config.scale_learning_rate
            new: dict[str, Any] = {"weight_decay": decay, "scale": scale, "params": [], "names": []}
            group = groups.setdefault((decay, scale), new)
            group["params"].append(parameter)
            group["names"].append(name)
        return list(groups.values())

    def start(self, optimizer: optim.Optimizer, parts: Parts) -> None:
        """Store how batches are divided into parts."""
        self.parts = parts
        self.slopes: list[tuple[_Part, float, Slopes]] = []

    def loss(self, called: nn.Module, fetched: Fetched, targets: Any, step: int, part: int) -> Loss:
        """Return the mean loss over the whole batch, of which this process has a part."""
        if self.slopes:  # `prepared` has computed the gradients of the whole batch
            inputs, value, slopes = self.slopes.pop(0)
            surrogate = called(*self._inputs(inputs, step, part), slopes=slopes)
            return Loss(surrogate - surrogate.detach() + value, len(inputs.rows))
        inputs = self._read(fetched, step, 0)
        # All processes use the same seed: each takes its rows of the draws of the whole batch, like a single process.
        self.noise.manual_seed(derive_seed(self.config.seed, step, 24))
        return Loss(called(*self._inputs(inputs, step, part), generator=self.noise), len(inputs.rows))

    def prepared(self, feed: Feed, step: int) -> Feed:
        """Return the parts of a step; if there are several, first compute the loss of the whole batch and its gradient.

        Like GradCache: embed every part without gradients, compute the loss over the embeddings of all processes, then
        embed every part again with gradients.
        """
        parts = list(itertools.islice(feed, self.config.accumulate))
        if self.config.accumulate > 1:
            read = [self._read(fetched, step, accumulated) for accumulated, (fetched, _) in enumerate(parts)]
            self.slopes = self._whole_batch(read, step)
        return iter(parts)

    def _read(self, fetched: Fetched, step: int, accumulated: int) -> "_Part":
        """Return a part of a batch without unreadable images."""
        start, stop = self.parts.places(step, accumulated)
        rows, seeds = self.order.of(start, stop)
        places = np.arange(start, stop) - step * self.config.batch_size
        if len(fetched.rows) < len(rows):  # the loss takes parts of any size
            if not len(fetched.rows):
                first = fetched.unreadable[0].path
                raise ValueError(f"none of {len(rows)} images of a batch could be read, first {first}")
            read = np.isin(rows, fetched.rows)
            rows, seeds, places = rows[read], seeds[read], places[read]
        return _Part(fetched.inputs, rows, seeds, places)

    def _inputs(self, part: "_Part", step: int, number: int) -> tuple[torch.Tensor, Any]:
        """Return the inputs of both towers; the step and the number of the part seed dropout and the like."""
        templates = towers.choose_templates(part.seeds, self.table.templates)
        texts = self.table.take(self.train_pairs.sources[part.rows], templates).to(self.device)
        torch.manual_seed(derive_seed(self.config.seed, step, number, 25))
        return part.inputs.to(self.device, non_blocking=True), texts

    def _whole_batch(self, read: "list[_Part]", step: int) -> "list[tuple[_Part, float, Slopes]]":
        """Return the loss of the whole batch and its gradients, divided over the parts for their backward passes."""
        model, config, embedded = self.model, self.config, []
        for accumulated, part in enumerate(read):
            with torch.no_grad(), autocast(self.device, config.precision):
                sides = model(*self._inputs(part, step, self.parts.part(accumulated)), embed=True)
                embedded.append([to_accumulation_dtype(side) for side in sides])
        images, texts = (torch.cat(side).requires_grad_() for side in zip(*embedded, strict=True))
        self.noise.manual_seed(derive_seed(config.seed, step, 24))
        # A draw depends on the position in the batch, so the division of pairs among processes changes neither the loss
        # nor its gradients.
        places = torch.from_numpy(np.concatenate([part.places for part in read]))
        noise: Any = [
            None if module is None else module.draw(config.batch_size, model.loss.num_samples, self.noise)[places]
            for module in (model.loss.image_noise, model.loss.text_noise)
        ]
        own = {name: whole(value.detach()).requires_grad_() for name, value in model.loss.named_parameters()}
        loss = torch.func.functional_call(model.loss, own, (images, texts), {"noise": tuple(noise)})
        of_images, of_texts, *of_own = torch.autograd.grad(loss, (images, texts, *own.values()))
        value, slopes_of_own = float(loss.detach()), dict(zip(own, of_own, strict=True))
        sizes = [len(part.rows) for part in read]
        slopes = zip(of_images.split(sizes), of_texts.split(sizes), strict=True)
        return [
            (part, 0.0 if number else value, Slopes(*pair, {} if number else slopes_of_own))
            for number, (part, pair) in enumerate(zip(read, slopes, strict=True))
        ]

    def status(self) -> dict[str, float]:
        """Return the learned scale of the logits."""
        return {"scale": number(self.model.loss.scale)}

    def validate(self) -> dict[str, Any]:
        """Return the loss and recall on the validation pairs, or without them on the training pairs."""
        split, config = self.pairs.splits[self.validation], self.config
        table = self.table if split.texts is self.train_pairs.texts else self.texts.table(split.texts)
        options = (config.evaluation_pairs, config.batch_size, config.workers)
        where: dict[str, Any] = {"precision": config.evaluation_precision, "world": self.world}
        metrics = validation_metrics(self._evaluated(), split, table, *options, **where)
        return {"split": self.validation, **metrics}

    def _evaluated(self) -> TwoTowers:
        if self.alone is not self.model:
            self.alone.load_state_dict({name: whole(value) for name, value in self.model.state_dict().items()})
        return self.alone.eval()

    def estimate(self, parts: Parts) -> Estimate | None:
        """Measure the loss and gradients of a step.

        With several processes the others wait, so the measurement leaves out all communication.
        """
        model, device, seconds = self.model, self.device, 0.0
        rows, seeds = self.order.of(*parts.places(0, 0))
        activations = Activations(model)
        with measuring(model):
            for _ in range(2):  # the first iteration warms up
                begin = now(device)
                fetched = self.split.fetch(rows, seeds)
                if not len(fetched.rows):
                    return None
                texts = self.table.take(self.train_pairs.sources[fetched.rows]).to(device)
                with activations.counting():
                    image, text = model.image(fetched.inputs.to(device)), model.text(texts)
                    loss = model.loss(image, text) if self.world.processes == 1 else (image * text).sum()
                if loss.requires_grad:
                    loss.backward()
                seconds = now(device) - begin
        memory = weight_memory(model) | {"the towers' activations": activations.bytes}
        return Estimate(memory, seconds, self.steps)

    def describe(self) -> dict[str, Any]:
        """Return the inputs of the towers and the fingerprint of the data."""
        return {
            "image": dataclasses.asdict(self.specs.image),
            "text": None if self.specs.text is None else dataclasses.asdict(self.specs.text),
            "data": fingerprint(self.dataset),
        }

    def write_data(self, directory: Path) -> None:
        """Write which pairs were swapped."""
        if self.train_pairs.swaps is not None:
            self.train_pairs.swaps.save(directory / "swaps.npz")

    def result(self, directory: Path, *, stopped: bool, validate: bool) -> dict[str, Any]:
        """Evaluate on all splits and write examples."""
        evaluation = evaluate_pairs(self._evaluated(), self.pairs, self.texts, self.config, world=self.world)
        if self.world.is_main:
            write_checked(directory / "examples.json", evaluation.examples)
        rows = {name: len(split) for name, split in self.dataset.splits.items()}
        return {
            "kind": "contrastive",
            "dataset": self.dataset.name,
            "data": {"rows": rows, "notes": list(self.dataset.notes)},
            "parameters": parameter_counts(self.whole, "image", "text", "loss"),
            **evaluation.result,
            **self.status(),
        }

    @staticmethod
    def summary(result: dict[str, Any]) -> str:
        """Describe zero-shot accuracy, recall and the detection of swaps."""
        parts = []
        for name, metrics in result["metrics"].items():
            if "zero_shot" in metrics:
                zero = metrics["zero_shot"]
                parts.append(
                    f"{name} zero-shot top-1 {zero['top1']:.1%}, top-5 {zero['top5']:.1%} of {zero['classes']:,} names"
                )
            parts.append(f"{name} recall@1 {metrics['image_to_text@1']:.1%} / {metrics['text_to_image@1']:.1%}")
        swaps = result.get("swaps", {})
        parts += [
            f"AUROC of the {kind} for swapped pairs {swaps[f'{kind}_auroc']:.3f}"
            for kind in ("noise", "distance")
            if swaps.get(f"{kind}_auroc") is not None
        ]
        return "; ".join(parts)


# ---- evaluation


@torch.no_grad()
def validation_metrics(
    model: TwoTowers, split: PairSplit, table: TextTable, limit: int = 0, batch_size: int = 256, workers: int = 0,
    precision: str = "float32", world: World | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the loss without noise, over batches of the training size, and recall, on `limit` random pairs.

    A limit of 0 uses all pairs. The processes of `world` divide the pairs.
    """
    rows = np.random.default_rng(0).permutation(len(split))[: limit or len(split)]
    embedded = towers.embed_pairs(model, split, table, rows, workers=workers, precision=precision, world=world)
    world = world or World(embedded.images.device)
    return world.on_main(lambda: _loss_and_recall(model, embedded, batch_size))


@torch.no_grad()
def _loss_and_recall(model: TwoTowers, embedded: Embedded, batch_size: int) -> dict[str, float]:
    size = min(batch_size, len(embedded.rows))
    starts = range(0, len(embedded.rows) - size + 1, size)  # a smaller last batch would have a lower loss
    parts = ((embedded.images[start : start + size], embedded.texts[start : start + size]) for start in starts)
    losses = [float(model.loss(images, texts, num_samples=0)) for images, texts in parts]
    return {"loss": float(np.mean(losses)), **recall_of(model, embedded)}


def recall_of(model: TwoTowers, embedded: Embedded) -> dict[str, float]:
    """Return recall at 1, 5 and 10 in both directions; pairs with equal texts match each other."""
    images, texts = model.loss.embed_image(embedded.images), model.loss.embed_text(embedded.texts)
    return retrieval_recall(images, texts, KS, embedded.groups)


class Classes(NamedTuple):
    """The distinct texts of some pairs as the classes of a zero-shot classifier."""

    weights: torch.Tensor  # [K, D]
    labels: np.ndarray  # [n], class of each pair
    names: list[str] | None  # None for vectors without captions


@torch.no_grad()
def classes_of(model: TwoTowers, embedded: Embedded, reader: TextReader, templates: Sequence[str]) -> Classes:
    """Return the classes of embedded pairs; templates do not apply to texts that are vectors."""
    _, first, labels = np.unique(embedded.groups, return_index=True, return_inverse=True)
    split, names = embedded.split, None
    if split.texts.captions is not None:
        names = [split.texts.captions[int(number)] for number in split.sources[embedded.rows[first]]]
    if names is None or split.texts.vectors is not None:
        return Classes(torch.nn.functional.normalize(embedded.texts[first], dim=-1), labels, names)

    def encode(texts: list[str]) -> torch.Tensor:
        table = reader.once(Texts(captions=texts))
        return model.text(table.take(np.arange(len(texts))).to(embedded.images.device))

    return Classes(zero_shot_weights(encode, names, templates), labels, names)


@torch.no_grad()
def zero_shot(
    model: TwoTowers, embedded: Embedded, classes: Classes, *, seen: set[str] | None = None, samples: int = 0,
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return the accuracy of zero-shot classification; with 0 samples, from representations without noise.

    Returns:
        "classes", "chance", "samples", "nll", "top1" and "top5". If the texts `seen` in training are known, also
        "unseen_classes", and "unseen_top1" and "unseen_top5" on images of classes that are not among them.
    """
    generator = torch.Generator(device=embedded.images.device).manual_seed(seed)
    labels, count = torch.from_numpy(classes.labels).to(embedded.images.device), len(classes.weights)
    best, losses, start = [], [], 0
    for log_probs in log_prob_blocks(model.loss, embedded.images, classes.weights, samples, generator):
        best.append(log_probs.topk(min(max(TOP), count), dim=-1).indices)
        losses.append(-log_probs.gather(1, labels[start : start + len(log_probs), None]))
        start += len(log_probs)
    hits = (torch.cat(best) == labels[:, None]).cpu().numpy()  # [n, 5]
    result: dict[str, Any] = {"classes": count, "chance": 1 / count, "samples": samples}
    result["nll"] = float(torch.cat(losses).double().mean())
    result |= {f"top{k}": float(hits[:, :k].any(1).mean()) for k in TOP}
    if seen is not None and classes.names is not None:
        unseen = np.array([name not in seen for name in classes.names])
        rows = unseen[classes.labels]
        result["unseen_classes"] = int(unseen.sum())
        if rows.any():
            result |= {f"unseen_top{k}": float(hits[rows, :k].any(1).mean()) for k in TOP}
    return result


@torch.no_grad()
def swap_scores(model: TwoTowers, embedded: Embedded) -> dict[str, Any]:
    """Return how well the distance and the noise of a pair detect swapped pairs.

    Returns:
        "swapped" (the share of swapped pairs), "distance_auroc" and, for a model with noise, "noise_auroc",
        "noise_mean_swapped" and "noise_mean_kept".
    """
    mask = embedded.swapped
    if mask is None:
        raise ValueError("split must have swaps, found none; make them with hetxl_train.data.pairs.swapped")
    distance = pair_distance(model.loss, embedded.images, embedded.texts).cpu().numpy()
    result: dict[str, Any] = {"swapped": float(mask.mean()), "distance_auroc": auroc(distance, mask)}
    if (noise := _noise(model, embedded)) is not None:
        result["noise_auroc"] = auroc(noise, mask)
        if mask.any() and not mask.all():
            result["noise_mean_swapped"] = float(noise[mask].mean())
            result["noise_mean_kept"] = float(noise[~mask].mean())
    return result


def _noise(model: TwoTowers, embedded: Embedded) -> np.ndarray | None:
    """Return the noise of every pair, [n]; None for a model without noise."""
    if model.loss.image_noise is None and model.loss.text_noise is None:
        return None
    return pair_noise(model.loss, embedded.images, embedded.texts).cpu().numpy()


class Evaluation(NamedTuple):
    """The evaluation of a trained model, as JSON values."""

    result: dict[str, Any]  # "metrics" by split and, if texts were swapped, "swaps"
    examples: dict[str, Any]  # "zero_shot", and "noisiest" and "calmest" pairs


@torch.no_grad()
def evaluate_pairs(
    model: TwoTowers, pairs: Pairs, texts: TextReader, config: ContrastiveConfig, *, samples: int | None = None,
    seen: set[str] | None = None, world: World | None = None,
) -> Evaluation:  # fmt: skip
    """Evaluate retrieval on validation and test pairs, zero-shot classification on test pairs, and detection of swaps.

    All processes of `world` call this, divide the embedding of the pairs, and get the same result.

    Args:
        model: the model, in evaluation mode.
        samples: number of samples of a second zero-shot evaluation; None for `eval_samples`, 0 for no second one.
        seen: texts of the training pairs; None for those of the training split, if any.
    """
    train = pairs.splits.get("train")
    if seen is None and train is not None and (captions := train.captions()) is not None:
        seen = set(captions)
    samples = config.eval_samples if samples is None else samples
    world = world or World(next(model.parameters()).device)

    def embed(split: PairSplit, rows: np.ndarray | None = None) -> Embedded:
        options: dict[str, Any] = {"workers": config.workers, "precision": config.evaluation_precision, "world": world}
        return towers.embed_pairs(model, split, texts.table(split.texts), rows, **options)

    def measure(embedded: Embedded, named: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        metrics: dict[str, Any] = {**recall_of(model, embedded)}
        if not named:
            return metrics, {}
        classes = classes_of(model, embedded, texts, config.prompts)
        options: dict[str, Any] = {"seen": seen, "seed": derive_seed(config.seed, 26)}
        metrics["zero_shot"] = zero_shot(model, embedded, classes, **options)
        if samples and model.loss.image_noise is not None:
            metrics["zero_shot_sampled"] = zero_shot(model, embedded, classes, samples=samples, **options)
        return metrics, {"zero_shot": _named(model, embedded, classes, seen)}

    def score(embedded: Embedded) -> tuple[dict[str, Any], dict[str, Any]]:
        scores = {} if embedded.split.swaps is None else {"swaps": swap_scores(model, embedded)}
        return scores, _noisy(model, embedded)

    result: dict[str, Any] = {"metrics": {}}
    examples: dict[str, Any] = {}
    for name in ("validation", "test"):
        if name in pairs.splits:
            embedded, named = embed(pairs.splits[name]), name == "test" or "test" not in pairs.splits
            result["metrics"][name], shown = world.on_main(partial(measure, embedded, named))
            examples |= shown
    noisy = model.loss.image_noise is not None or model.loss.text_noise is not None
    if train is not None and (noisy or train.swaps is not None):
        scored = SCORED if train.swaps is not None else SHOWN
        rows = np.sort(np.random.default_rng(0).permutation(len(train))[:scored])
        scores, shown = world.on_main(partial(score, embed(train, rows)))
        result |= scores
        examples |= shown
    return Evaluation(result, examples)


def _named(model: TwoTowers, embedded: Embedded, classes: Classes, seen: set[str] | None) -> list[dict[str, Any]]:
    """Return some images with the three most probable names; first those whose names were unseen in training."""
    labels, names = classes.labels, classes.names
    if names is None:
        return []
    order = np.random.default_rng(0).permutation(len(embedded.rows))
    if seen is not None:
        unseen = np.array([names[label] not in seen for label in labels[order]])
        order = np.concatenate((order[unseen], order[~unseen]))
    chosen = order[:EXAMPLES]
    best, logs = top_k(model.loss, embedded.images[torch.from_numpy(chosen)], classes.weights, 3)
    entries = []
    for index, ids, values in zip(chosen, best.tolist(), logs.exp().tolist(), strict=True):
        label = names[int(labels[index])]
        top = [[names[number], value] for number, value in zip(ids, values, strict=True)]
        entry = _shown(embedded, index) | {"label": label, "top": top, "hit": names[ids[0]] == label}
        entries.append(entry if seen is None else entry | {"unseen": label not in seen})
    return entries


def _noisy(model: TwoTowers, embedded: Embedded) -> dict[str, list[dict[str, Any]]]:
    """Return the pairs with the most and with the least noise; empty for a model without noise."""
    scores, mask = _noise(model, embedded), embedded.swapped
    if scores is None:
        return {}
    order, half = np.argsort(-scores, kind="stable"), EXAMPLES // 2
    return {
        kind: [
            _shown(embedded, index)
            | {
                "label": embedded.split.caption(int(embedded.rows[index])) or "",
                "noise": float(scores[index]),
                "swapped": None if mask is None else bool(mask[index]),
            }
            for index in chosen
        ]
        for kind, chosen in (("noisiest", order[:half]), ("calmest", order[::-1][:half]))
    }


def _shown(embedded: Embedded, index: int) -> dict[str, Any]:
    """Return the row of a pair with its image as a data: URL, if it has one, and its path."""
    row = int(embedded.rows[index])
    shown = embedded.split.images.show(row)
    return {"row": row, "image": image_of(shown), "path": shown.image}
