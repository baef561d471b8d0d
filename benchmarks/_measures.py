"""The measures that carry a bar. Each takes a meter and answers with rows of the table."""

from collections.abc import Callable
from dataclasses import replace

from _bars import Bar, Row
from _cases import Case
from _memory import MEGABYTE
from _meter import Meter
from _top_k import TOP_K, compare_top_k

FLOAT = 4
"""Bytes."""


def duration(seconds: float) -> str:
    """Seconds or milliseconds, as a reader would say it."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"


def size(peak: float) -> str:
    """Bytes as MB."""
    return f"{peak / MEGABYTE:,.0f} MB"


def step_case(meter: Meter, batch: int | None = None, samples: int | None = None) -> Case:
    """The step most measures are about."""
    sizes = meter.sizes
    return Case("hetxl", batch or sizes.small_batch, sizes.D, sizes.K, samples or sizes.S)


def _speed_up(meter: Meter, case: Case, name: str, bar: Bar) -> Row:
    """How much faster the head is than samples first."""
    det, samples, ours = meter.by_methods(case, ("det", "samples", "hetxl"))
    detail = f"{duration(ours)} against {duration(samples)}; DET {duration(det)}"
    return Row(
        f"{name}, S = {case.samples:,}, B = {case.batch}: speed-up over samples first", samples / ours, bar, detail
    )


def softmax_loss(meter: Meter) -> list[Row]:
    """Loss and backward, HET-XL, softmax."""
    return [_speed_up(meter, step_case(meter), "HET-XL softmax, loss + backward", Bar(10, 14, at_least=True))]


def sigmoid_loss(meter: Meter) -> list[Row]:
    """Loss and backward, HET-XL, sigmoid."""
    case = replace(step_case(meter), link="sigmoid")
    return [_speed_up(meter, case, "HET-XL sigmoid, loss + backward", Bar(8, 12, at_least=True))]


def prediction(meter: Meter) -> list[Row]:
    """The probabilities of all classes."""
    case = replace(step_case(meter), task="predict")
    return [_speed_up(meter, case, "HET-XL softmax, predict", Bar(8, 12, at_least=True))]


def _memory_over_det(meter: Meter, case: Case, name: str, bar: Bar, own: int = 0) -> Row:
    """Peak of a step less that of DET and less `own` bytes."""
    ours, det = meter.peak(case), meter.peak(case.by("det"))
    less = f", less {size(own)} of its own gradients" if own else ""
    detail = f"{size(ours)} against {size(det)}{less}"
    name = f"{name}, S = {case.samples:,}, B = {case.batch}: peak memory beyond DET's"
    return Row(name, (ours - det - own) / MEGABYTE, bar, detail)


def softmax_memory(meter: Meter) -> list[Row]:
    """Peak memory of loss and backward."""
    case = step_case(meter, meter.sizes.batch)
    return [_memory_over_det(meter, case, "HET-XL softmax, loss + backward", Bar(400, 200, unit="MB"))]


def one_sample(meter: Meter) -> list[Row]:
    """The cost of the head beside DET where sampling itself costs nothing."""
    case = step_case(meter, meter.sizes.batch, samples=1)
    det, ours = meter.by_methods(case, ("det", "hetxl"))
    name = f"HET-XL softmax, loss + backward, S = 1, B = {case.batch}: time over DET's"
    return [Row(name, ours / det, Bar(1.6, 1.3), f"{duration(ours)} against {duration(det)}")]


def training_step(meter: Meter) -> list[Row]:
    """A whole training step of a ResNet152: time and memory."""
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
    """HET, whose noise lives on the classes: time and memory."""
    case = replace(step_case(meter), head="het")
    name = "HET softmax, loss + backward"
    # Beside DET's parameters HET has two layers D → K and the factors [R, K]; each has a gradient.
    own = FLOAT * case.classes * (2 * (case.features + 1) + case.rank)
    return [
        _speed_up(meter, case, name, Bar(1, 2, at_least=True)),
        _memory_over_det(meter, case, name, Bar(400, unit="MB"), own),
    ]


def top_k(meter: Meter) -> list[Row]:
    """The few most probable classes of a trained head, against the prediction of all."""
    sizes = meter.sizes
    found = compare_top_k(meter)
    where = f"K = {sizes.top_k_classes:,}, S = {sizes.S:,}, B = {sizes.top_k_batch}"
    name = f"predict(top_k={TOP_K}) of a trained HET-XL head, {where}"
    detail = f"{duration(found.pruned)} against {duration(found.full)}; accuracy {found.accuracy:.0%}"
    return [
        Row(f"{name}: speed-up over predict", found.full / found.pruned, Bar(3, 10, at_least=True), detail),
        Row(
            f"{name}: total variation from predict",
            found.total_variation,
            Bar(1e-3, unit=""),
            f"the largest of {sizes.top_k_batch} examples; the same draws",
        ),
    ]


def growth(meter: Meter) -> list[Row]:
    """Time and memory as the classes grow."""
    sizes = meter.sizes
    cases = [
        Case("hetxl", sizes.growth_batch, sizes.growth_features, classes, sizes.growth_samples)
        for classes in sizes.growth_classes
    ]
    seconds = meter.seconds(*cases)
    each = [1e6 * second / case.classes for second, case in zip(seconds, cases, strict=True)]
    detail = ", ".join(f"{value:.3g} µs at K = {case.classes:,}" for value, case in zip(each, cases, strict=True))
    last = cases[-1]
    # The classifier is there before the step; its gradient is not.
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
"""By the names that the command line takes."""
