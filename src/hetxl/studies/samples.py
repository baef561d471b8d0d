"""`hetxl study samples`: what more samples are worth and cost, in training and evaluation (Tables "MC samples",
"Training time vs. performance")."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetxl.studies.charts import plot_lines
from hetxl.studies.forms import LEARNED, Form
from hetxl.studies.lines import NLL, PRECISION, SECONDS, Line, LineStudy, cells_of, values_of
from hetxl.studies.measure import HeadSize, Step, Way, predicted_bytes, seconds_of, step_of, warm_up
from hetxl.studies.study import Lab, Summary
from hetxl.studies.tables import Column, Row, Table
from hetxl.studies.verdicts import against, change, holds, sign
from hetxl.training.files import read_json
from hetxl.training.parallel import one_thread

HEADS: dict[str, tuple[str, dict[str, Any]]] = {"HET": ("het", {}), "HET-XL": ("het-xl", LEARNED)}


def step_times(lab: Lab, line: Line, samples: Sequence[int]) -> dict[str, dict[str, float | None]]:
    """Milliseconds of the head's part of a step, by way and S; None where it does not fit the budget."""
    place = lab.cache.place(line.training(lab.seeds[0]))
    config, classes = line.training(lab.seeds[0]).config, len(read_json(place / "model.json")["class_names"])
    size = HeadSize(config.features or 128, classes, config.rank)
    head = size.build(line.head)
    warm_up(line.head)
    found: dict[str, dict[str, float | None]] = {"engine": {}, "paper": {}}
    ways: tuple[Way, Way] = ("engine", "paper")
    with one_thread():
        for way in ways:
            for count in samples:
                step = Step(line.head, way, config.batch_size, count)
                fits = way == "engine" or predicted_bytes(head, step) <= lab.form.sizes.budget
                seconds = None
                if fits:
                    run = step_of(head, step)
                    seconds = 1000 * seconds_of(run, lab.form.sizes.repeats, lab.form.sizes.seconds)
                found[way][str(count)] = seconds
    return found


class Samples(LineStudy):
    """S from 1 to 1,000 for HET and HET-XL, the same in training and evaluation."""

    name = "samples"
    question = (
        "How many Monte Carlo samples are needed, in training and evaluation alike, and what do they cost: by our "
        "evaluation, and by the paper's, which gives the same numbers?"
    )
    paper = ("tab:latency_vs_perf",)
    claim = (
        "HET-XL is not highly sensitive to the number of samples, and with one sample it still outperforms HET with "
        "1,000"
    )
    title = "Sensitivity to the number of samples"

    def lines(self, form: Form) -> Sequence[Line]:
        """Both heads with every S."""
        return [
            Line(str(count), head, form.sampling, {**options, "train_samples": count, "eval_samples": count}, label)
            for label, (head, options) in HEADS.items()
            for count in form.samples
        ]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Beside the trainings, the time of a step."""
        found = super().measure(lab)
        first = {line.group: line for line in reversed(self.lines(lab.form))}
        found["milliseconds"] = {label: step_times(lab, first[label], lab.form.samples) for label in HEADS}
        return found

    def tables(self, summary: Summary) -> Sequence[Table]:
        """As the paper's with samples down, and the time of a step by both ways."""
        kinds = (NLL, PRECISION, SECONDS)
        columns = [Column(f"{label} {kind.name}", kind.digits, kind.better) for label in HEADS for kind in kinds]
        rows, steps = [], []
        for count in _counts(summary):
            cells: list[Any] = []
            times: list[Any] = []
            for label in HEADS:
                cells += cells_of(values_of(summary, count, label), kinds)
                times += [summary["milliseconds"][label][way][count] for way in ("engine", "paper")]
            rows.append(Row(count, cells))
            steps.append(Row(count, ["out of memory budget" if time is None else time for time in times]))
        head = "samples"
        timed = [Column(f"{label}, {way}, ms", 1) for label in HEADS for way in ("hetxl", "the paper's evaluation")]
        note = f"{summary['lines'][0]['data']}, the same S in training and evaluation"
        return [
            Table(self.title, columns, rows, note, head),
            Table("The head's part of a step", timed, steps, "loss and gradients of one batch, one thread", head),
        ]

    def plot(self, summary: Summary, path: Path) -> Path:
        """NLL and the time of a step over S."""
        counts = _counts(summary)
        nll = {
            label: [(float(count), (values_of(summary, count, label) or {}).get("nll", [])) for count in counts]
            for label in HEADS
        }
        times = {
            f"{label}, {name}": [
                (float(count), [value] if (value := summary["milliseconds"][label][way][count]) is not None else [])
                for count in counts
            ]
            for label in HEADS
            for way, name in (("engine", "hetxl"), ("paper", "the paper's"))
        }
        time_axis = "head's part of a step, ms"
        return plot_lines({"test NLL": nll, time_axis: times}, path, "samples", log_x=True, log_y=(time_axis,))

    def conclusion(self, summary: Summary) -> str:
        """HET-XL with one sample against HET with the most, and against itself."""
        first, last = _counts(summary)[0], _counts(summary)[-1]
        rival = against(values_of(summary, first, "HET-XL"), values_of(summary, last, "HET"))
        own = against(values_of(summary, first, "HET-XL"), values_of(summary, last, "HET-XL"))
        found = {None: None, -1: True, 0: None, 1: False}[sign(rival)]
        times = summary["milliseconds"]["HET-XL"]
        shared = [
            (count, times["paper"][count] / times["engine"][count])
            for count in _counts(summary)
            if times["paper"][count] is not None
        ]
        speed = ""
        if shared:
            speed = f"At S = {shared[-1][0]} the paper's evaluation takes {shared[-1][1]:.1f} times as long as ours. "
        return (
            f"HET-XL's NLL with S = {first}, compared with its own at S = {last}, is {change(own)}; compared with "
            "HET's at "
            f"S = {last} it is {change(rival)}. {speed}"
            f"{holds(found, 'HET-XL with one sample outperforms HET with the most')}"
        )


def _counts(summary: Summary) -> list[str]:
    return list(dict.fromkeys(line["label"] for line in summary["lines"]))


STUDY = Samples()
