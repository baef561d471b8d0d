"""The sizes of a run, and measuring with them: every step is measured once, however many tables ask for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from _cases import Case, Method, prepare
from _memory import peak_bytes
from _timing import interleaved_medians


@dataclass(frozen=True)
class Sizes:
    """What a run measures; the symbols are those of the documentation.

    Attributes:
        D: feature size.
        K: classes.
        S: the samples of the paper's evaluation.
        small_batch: B where the samples-first evaluation must still fit.
        batch: B of a usual step.
        image_batch: B of the whole training step.
        pixels: side of its images.
        growth_classes: K of the measure of growth, rising.
        growth_features: its D.
        growth_samples: its S.
        growth_batch: its B.
        top_k_classes: K of the trained head.
        top_k_features: its D.
        top_k_steps: training steps.
        top_k_batch: B of its predictions.
        curve_samples: S of the two figures, rising.
        repeats: rounds of a timing, at most.
        least: rounds of a timing that has a bar, at least.
        limit: seconds of a timing.
        curve_limit: seconds of one cell of the figures.
    """

    D: int = 2048
    K: int = 21_843
    S: int = 1000
    small_batch: int = 8
    batch: int = 64
    image_batch: int = 4
    pixels: int = 224
    growth_classes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    growth_features: int = 256
    growth_samples: int = 16
    growth_batch: int = 32
    top_k_classes: int = 8192
    top_k_features: int = 256
    top_k_steps: int = 200
    top_k_batch: int = 32
    curve_samples: tuple[int, ...] = (1, 4, 16, 64, 256, 1000)
    repeats: int = 9
    least: int = 3
    limit: float = 30.0
    curve_limit: float = 10.0


FULL = Sizes()
QUICK = Sizes(
    D=64,
    K=500,
    S=100,
    small_batch=4,
    batch=8,
    image_batch=2,
    pixels=32,
    growth_classes=(500, 1000, 2000),
    growth_features=32,
    growth_batch=4,
    top_k_classes=500,
    top_k_features=32,
    top_k_steps=20,
    top_k_batch=4,
    curve_samples=(1, 10, 100),
    repeats=2,
    limit=2.0,
    curve_limit=1.0,
)


class Meter:
    """Times and peak memory of cases.

    Args:
        sizes: of the run.
        say: told what is being measured.
    """

    def __init__(self, sizes: Sizes, say: Callable[[str], None]):
        self.sizes = sizes
        self.say = say
        self._seconds: dict[tuple[Case, ...], list[float]] = {}
        self._peaks: dict[Case, int] = {}

    def seconds(self, *cases: Case, with_bar: bool = True) -> list[float]:
        """Median seconds of the cases, which take turns; those that carry no bar get less time."""
        if cases not in self._seconds:
            least, limit = (self.sizes.least, self.sizes.limit) if with_bar else (1, self.sizes.curve_limit)
            tasks = {str(place): prepare(case) for place, case in enumerate(cases)}
            self._seconds[cases] = self.time(tasks, least, limit)
        return self._seconds[cases]

    def time(self, tasks: dict[str, Callable[[], object]], least: int, limit: float) -> list[float]:
        """Median seconds of tasks that take turns."""
        return list(interleaved_medians(tasks, self.sizes.repeats, least=least, limit=limit).values())

    def by_methods(self, case: Case, methods: Sequence[Method], with_bar: bool = True) -> list[float]:
        """Median seconds of the same step in several ways."""
        return self.seconds(*(case.by(method) for method in methods), with_bar=with_bar)

    def peak(self, case: Case) -> int:
        """Peak bytes of a step, in a process of its own."""
        if case not in self._peaks:
            self._peaks[case] = peak_bytes(case)
        return self._peaks[case]
