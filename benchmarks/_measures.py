"""The measures that have a bar; each takes a meter and returns rows of the table."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from _cases import Case
from _meter import MEGABYTE, Meter, Sizes
from _report import Bar, Row
from torch import Tensor

import hetxl

TOP_K = 5
TRAIN_BATCH, TRAIN_SAMPLES = 32, 16
TWIN_SHARE = 0.3
TWIN_DISTANCE = 0.3
"""Distance of a class from the centre of its pair, relative to that of two pairs."""
FIRST_LOGIT = 40.0
"""Logit of the true class before training: large enough among thousands at the initial temperature."""


class TopK(NamedTuple):
    """Times and difference of the two predictions.

    Attributes:
        pruned: seconds of the prediction of the top classes.
        full: seconds of the prediction of all classes.
        det: seconds of DET's prediction of the top classes, with the same classifier.
        total_variation: largest over the examples, see `total_variation`.
        accuracy: accuracy of the full prediction, which shows how well the head is trained.
    """

    pruned: float
    full: float
    det: float
    total_variation: float
    accuracy: float


class Problem:
    """Classes in pairs of near twins; features are the class centre with noise, and 3 labels in 10 are the twin's."""

    def __init__(self, classes: int, features: int):
        pairs = torch.randn(classes // 2, features).repeat_interleave(2, dim=0)
        self.centres = pairs + TWIN_DISTANCE * torch.randn(classes, features)  # [K, D]

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return features [count, D], and [count] labels and true classes."""
        classes = torch.randint(len(self.centres), (count,))
        features = self.centres[classes] + 0.5 * torch.randn(count, self.centres.shape[1])
        labels = torch.where(torch.rand(count) < TWIN_SHARE, classes ^ 1, classes)
        return features, labels, classes


def train_head(problem: Problem, sizes: Sizes) -> hetxl.HetXLHead:
    """Train a head for a few hundred steps from a classifier at the centres, like a converted head."""
    # Start with noise as large as the authors': with small noise, pruning would be trivial.
    head = hetxl.HetXLHead(sizes.top_k_features, sizes.top_k_classes, noise_init=1.0, temperature=1.0)
    with torch.no_grad():
        head.get_parameter("classifier.weight").copy_(problem.centres * (FIRST_LOGIT / sizes.top_k_features))
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-3)
    for _ in range(sizes.top_k_steps):
        features, labels, _ = problem.draw(TRAIN_BATCH)
        loss = head.loss(features, labels, num_samples=TRAIN_SAMPLES)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
    return head.eval()


def total_variation(top: Tensor, indices: Tensor, full: Tensor) -> Tensor:
    """Return the total variation between two predictions; classes outside the top of the first count as one class.

    Args:
        top: [B, k] probabilities.
        indices: [B, k] their classes.
        full: [B, K] probabilities.

    Returns:
        [B]
    """
    difference = top - full.gather(-1, indices)
    return (difference.abs().sum(-1) + difference.sum(-1).abs()) / 2


Predict = Callable[[int | None], hetxl.nn.Prediction]


def prepare_top_k(sizes: Sizes) -> tuple[Predict, Predict, Tensor]:
    """Train a head; return its prediction of the top classes, or of all for None, DET's, and the true classes [B]."""
    torch.manual_seed(0)
    problem = Problem(sizes.top_k_classes, sizes.top_k_features)
    head = train_head(problem, sizes)
    features, _, classes = problem.draw(sizes.top_k_batch)

    def predict(top_k: int | None) -> hetxl.nn.Prediction:
        generator = torch.Generator().manual_seed(0)
        return head.predict(features, top_k=top_k, num_samples=sizes.S, generator=generator)

    det = hetxl.DetHead(sizes.top_k_features, sizes.top_k_classes, classifier=head.classifier).eval()
    return predict, lambda top_k: det.predict(features, top_k=top_k), classes


def compare_top_k(meter: Meter) -> TopK:
    """Train a head, then time both predictions and compare them on the same draws."""
    sizes = meter.sizes
    meter.say("training the head")
    predict, det, classes = prepare_top_k(sizes)
    meter.say("predicting")
    tasks: dict[str, Callable[[], object]] = {
        "pruned": lambda: predict(TOP_K),
        "full": lambda: predict(None),
        "det": lambda: det(TOP_K),
    }
    pruned, full, plain = meter.time(tasks, sizes.least, sizes.limit)
    top, everything = predict(TOP_K), predict(None)
    assert top.indices is not None
    variation = total_variation(top.probs, top.indices, everything.probs)
    accuracy = (everything.labels == classes).float().mean()
    return TopK(pruned, full, plain, float(variation.max()), float(accuracy))


FLOAT = 4  # bytes


def duration(seconds: float) -> str:
    """Return a time in seconds or milliseconds as text."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"


def size(peak: float) -> str:
    """Return bytes in MB as text."""
    return f"{peak / MEGABYTE:,.0f} MB"


def step_case(meter: Meter, batch: int | None = None, samples: int | None = None) -> Case:
    """Return the step of most measures."""
    sizes = meter.sizes
    return Case("hetxl", batch or sizes.small_batch, sizes.D, sizes.K, samples or sizes.S)


def _speed_up(meter: Meter, case: Case, name: str, bar: Bar) -> Row:
    """Measure the speed-up of the head over samples first."""
    det, samples, ours = meter.by_methods(case, ("det", "samples", "hetxl"))
    detail = f"{duration(ours)} against {duration(samples)}; DET {duration(det)}"
    return Row(
        f"{name}, S = {case.samples:,}, B = {case.batch}: speed-up over samples first", samples / ours, bar, detail
    )


def softmax_loss(meter: Meter) -> list[Row]:
    """Measure loss and backward, HET-XL, softmax."""
    return [_speed_up(meter, step_case(meter), "HET-XL softmax, loss + backward", Bar(10, 14, at_least=True))]


def sigmoid_loss(meter: Meter) -> list[Row]:
    """Measure loss and backward, HET-XL, sigmoid."""
    case = replace(step_case(meter), link="sigmoid")
    return [_speed_up(meter, case, "HET-XL sigmoid, loss + backward", Bar(8, 12, at_least=True))]


def prediction(meter: Meter) -> list[Row]:
    """Measure the prediction of all classes."""
    case = replace(step_case(meter), task="predict")
    return [_speed_up(meter, case, "HET-XL softmax, predict", Bar(8, 12, at_least=True))]


def _memory_over_det(meter: Meter, case: Case, name: str, bar: Bar, own: int = 0) -> Row:
    """Measure the peak of a step minus that of DET and minus `own` bytes."""
    ours, det = meter.peak(case), meter.peak(case.by("det"))
    less = f", less {size(own)} of its own gradients" if own else ""
    detail = f"{size(ours)} against {size(det)}{less}"
    name = f"{name}, S = {case.samples:,}, B = {case.batch}: peak memory beyond DET's"
    return Row(name, (ours - det - own) / MEGABYTE, bar, detail)


def softmax_memory(meter: Meter) -> list[Row]:
    """Measure the peak memory of loss and backward."""
    case = step_case(meter, meter.sizes.batch)
    return [_memory_over_det(meter, case, "HET-XL softmax, loss + backward", Bar(400, 200, unit="MB"))]


def one_sample(meter: Meter) -> list[Row]:
    """Measure the cost of the head relative to DET with one sample."""
    case = step_case(meter, meter.sizes.batch, samples=1)
    det, ours = meter.by_methods(case, ("det", "hetxl"))
    name = f"HET-XL softmax, loss + backward, S = 1, B = {case.batch}: time over DET's"
    return [Row(name, ours / det, Bar(1.6, 1.3), f"{duration(ours)} against {duration(det)}")]


def training_step(meter: Meter) -> list[Row]:
    """Measure time and memory of a whole training step of a ResNet152."""
    sizes = meter.sizes
    case = Case("hetxl", sizes.image_batch, 2048, sizes.K, sizes.S, task="train", pixels=sizes.pixels)
    det, ours = meter.by_methods(case, ("det", "hetxl"))
    det_peak, our_peak = meter.peak(case.by("det")), meter.peak(case)
    name = f"ResNet152 training step, {case.pixels} px, S = {case.samples:,}, B = {case.batch}"
    return [
        Row(f"{name}: time over DET's", ours / det, Bar(1.4, 1.2), f"{duration(ours)} against {duration(det)}"),
        Row(
            f"{name}: peak memory over DET's",
            our_peak / det_peak,
            Bar(1.15, 1.05),
            f"{size(our_peak)} against {size(det_peak)}",
        ),
    ]


def het(meter: Meter) -> list[Row]:
    """Measure time and memory of HET, whose noise is in the space of the classes."""
    case = replace(step_case(meter), head="het")
    name = "HET softmax, loss + backward"
    # In addition to DET's parameters, HET has two layers D → K and the factors [R, K], each with a gradient.
    own = FLOAT * case.classes * (2 * (case.features + 1) + case.rank)
    return [
        _speed_up(meter, case, name, Bar(1, 2, at_least=True)),
        _memory_over_det(meter, case, name, Bar(400, unit="MB"), own),
    ]


def top_k(meter: Meter) -> list[Row]:
    """Compare the most probable classes of a trained head with the prediction of all."""
    sizes = meter.sizes
    comparison = compare_top_k(meter)
    sizes_text = f"K = {sizes.top_k_classes:,}, S = {sizes.S:,}, B = {sizes.top_k_batch}"
    name = f"predict(top_k={TOP_K}) of a trained HET-XL head, {sizes_text}"
    detail = f"{duration(comparison.pruned)} against {duration(comparison.full)}; accuracy {comparison.accuracy:.0%}"
    return [
        Row(f"{name}: speed-up over predict", comparison.full / comparison.pruned, Bar(3, 10, at_least=True), detail),
        Row(
            f"{name}: time over DET's",
            comparison.pruned / comparison.det,
            Bar(5, 2.5),
            f"{duration(comparison.pruned)} against {duration(comparison.det)}",
        ),
        Row(
            f"{name}: total variation from predict",
            comparison.total_variation,
            Bar(1e-3, unit=""),
            f"the largest of {sizes.top_k_batch} examples; the same draws",
        ),
    ]


def growth(meter: Meter) -> list[Row]:
    """Measure time and memory as the number of classes grows."""
    sizes = meter.sizes
    cases = [
        Case("hetxl", sizes.growth_batch, sizes.growth_features, classes, sizes.growth_samples)
        for classes in sizes.growth_classes
    ]
    seconds = meter.seconds(*cases)
    each = [1e6 * second / case.classes for second, case in zip(seconds, cases, strict=True)]
    detail = ", ".join(f"{value:.3g} µs at K = {case.classes:,}" for value, case in zip(each, cases, strict=True))
    last = cases[-1]
    # The classifier exists before the step, but its gradient does not.
    gradient = FLOAT * last.classes * (last.features + 1)
    peak = meter.peak(last)
    name = f"HET-XL softmax, loss + backward, D = {last.features}, S = {last.samples}, B = {last.batch}"
    return [
        Row(
            f"{name}: time per class at K = {last.classes:,} over that at fewer",
            each[-1] / min(each[:-1]),
            Bar(1.2),
            detail,
        ),
        Row(
            f"{name}, K = {last.classes:,}: peak memory beyond the classifier and its gradient",
            (peak - gradient) / MEGABYTE,
            Bar(500, unit="MB"),
            f"{size(peak)}, less {size(gradient)}",
        ),
    ]


MEASURES: dict[str, Callable[[Meter], list[Row]]] = {
    "softmax": softmax_loss,
    "sigmoid": sigmoid_loss,
    "predict": prediction,
    "memory": softmax_memory,
    "one-sample": one_sample,
    "training-step": training_step,
    "het": het,
    "top-k": top_k,
    "growth": growth,
}
"""By name on the command line."""
