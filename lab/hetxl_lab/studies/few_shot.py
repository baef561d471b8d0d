"""`hetxl study few-shot`: are HET-XL's features better to learn new classes from (Table "Few-shot")?

Every fifth class, or every third, is kept away from training. A linear classifier over the features then learns these
classes from a few examples of each, in closed form. `hetxl study few-shot RUN DATA` does the same with the features of
runs that exist, on any labelled data.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hetxl._seeds import derive_seed
from hetxl_lab.studies.charts import plot_lines
from hetxl_lab.studies.class_subsets import apply_view
from hetxl_lab.studies.profiles import LEARNED, Bench, Profile
from hetxl_lab.studies.runs import StudyRun
from hetxl_lab.studies.study import Lab, PaperStudy, Summary
from hetxl_lab.studies.verdicts import against, agree, change, holds, mean_cell, sign
from hetxl_train.backbones import Backbone
from hetxl_train.data.dataset import Dataset
from hetxl_train.data.open import open_data, open_dataset, split_spec
from hetxl_train.model import feature_batches
from hetxl_train.report.read import find_runs
from hetxl_train.report.statistics import PairedTest
from hetxl_train.report.tables import Column, Row, Table
from hetxl_train.runs import Trained, load_run

HEADS: dict[str, tuple[str, dict[str, Any]]] = {"DET": ("det", {}), "HET-XL": ("het-xl", LEARNED)}
DRAWS = 5  # draws of the few examples, over which accuracies are averaged
TESTED = 3000  # test examples, at most
RIDGE = 0.1  # weight of the penalty, in units of the mean square of a feature's sum


class Task(NamedTuple):
    """Examples of unknown classes, whose ids count from 0."""

    support: np.ndarray  # [n] rows of the training split to draw from, by class
    support_ids: np.ndarray  # [n]
    query: np.ndarray  # [m] rows of the test split
    query_ids: np.ndarray  # [m]
    shots: int  # examples that each class has at least


def make_task(dataset: Dataset, shots: Sequence[int]) -> Task:
    """Choose classes: those with enough training examples for the most shots that half of all classes have."""
    train, test = (np.asarray(dataset.splits[name].labels.ids) for name in ("train", "test"))
    counts = np.bincount(train, minlength=dataset.num_classes)
    tested = np.bincount(test, minlength=dataset.num_classes) > 0
    possible = [count for count in shots if ((counts >= count) & tested).sum() * 2 >= tested.sum()]
    if not possible or not tested.any():
        raise ValueError(f"{dataset.name} has no {min(shots)} training examples for half of its unknown classes")
    most = max(possible)
    classes = np.flatnonzero((counts >= most) & tested)
    if len(classes) < 2:
        raise ValueError(f"{dataset.name} has one class to learn from {most} examples; few-shot evaluation needs two")
    ids = np.full(dataset.num_classes, -1)
    ids[classes] = np.arange(len(classes))
    support, query = np.flatnonzero(ids[train] >= 0), np.flatnonzero(ids[test] >= 0)
    if len(query) > TESTED:
        query = np.sort(np.random.default_rng(0).choice(query, TESTED, replace=False))
    rng = np.random.default_rng(1)
    # Common classes have thousands of examples, but a few times the most shots are enough to draw from.
    shuffled = rng.permutation(support)
    drawn = first_of_each(shuffled, ids[train[shuffled]], 4 * most)
    return Task(drawn, ids[train[drawn]], query, ids[test[query]], most)


def first_of_each(rows: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` rows [n] of every class, by class, where ids [n] are those of the rows."""
    order = np.argsort(ids, kind="stable")
    labels = ids[order]
    return rows[order[np.arange(len(order)) - np.searchsorted(labels, labels) < count]]


def ridge(features: Tensor, ids: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fit a linear classifier by ridge regression: weights [D, k], and mean and scale [D] of the features.

    Args:
        features: [n, D]
        ids: [n]
        classes: k
    """
    mean, scale = features.mean(0), features.std(0).clamp(min=1e-6)
    inputs = (features - mean) / scale
    targets = torch.nn.functional.one_hot(ids, classes).to(inputs.dtype) - 1 / classes
    gram = inputs.mT @ inputs
    penalty = RIDGE * gram.diagonal().mean().clamp(min=1e-6)
    gram.diagonal().add_(penalty)
    return torch.linalg.solve(gram, inputs.mT @ targets), mean, scale


def accuracy(support: Tensor, support_ids: Tensor, query: Tensor, query_ids: Tensor, classes: int) -> float:
    """Return the accuracy on queries [m, D] of a linear classifier fitted to the support [n, D], with k classes."""
    weight, mean, scale = ridge(support.double(), support_ids, classes)
    scores = ((query.double() - mean) / scale) @ weight
    return float((scores.argmax(-1) == query_ids).double().mean())


def accuracies(backbone: Backbone, seed: int, dataset: Dataset, task: Task, shots: Sequence[int]) -> list[float]:
    """Return accuracies of a backbone's features, one for each number of shots; the seed determines the draws."""
    support, query = (
        torch.cat([part for part, _ in feature_batches(backbone, dataset.splits[name], rows, 0, torch.device("cpu"))])
        for name, rows in (("train", task.support), ("test", task.query))
    )
    classes, means = int(task.support_ids.max()) + 1, []
    query_ids = torch.from_numpy(task.query_ids)
    for count in shots:
        scores = []
        for draw in range(DRAWS):
            rng = np.random.default_rng(derive_seed(seed, count, draw))
            shuffled = rng.permutation(len(task.support_ids))
            chosen = first_of_each(shuffled, task.support_ids[shuffled], count)
            ids = torch.from_numpy(task.support_ids[chosen])
            scores.append(accuracy(support[torch.from_numpy(chosen)], ids, query, query_ids, classes))
        means.append(sum(scores) / DRAWS)
    return means


class FewShot(PaperStudy):
    """Features of DET and HET-XL on classes that they were not trained on."""

    name = "few-shot"
    question = (
        "Do the features that HET-XL learns serve better for classes that it never saw? A linear classifier learns "
        "those from a few examples of each."
    )
    paper = ("tab:few_shot",)
    claim = "HET-XL's representations transfer better than DET's for every number of shots"

    def normalised(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with a single argument taken as the data; a run requires data as well."""
        if options.get("run") is None or options.get("data") is not None:
            return dict(options)
        if any((Path(options["run"]) / name).exists() for name in ("config.json", "compare.json")):
            raise ValueError(f"{options['run']} is a run; give the data to evaluate it on: few-shot RUN DATA")
        return {**options, "data": options["run"], "run": None}

    def adapt(self, profile: Profile, options: Mapping[str, Any]) -> Profile:
        """Return the profile with the user's data; existing runs need no training."""
        if options.get("run") is None:
            return super().adapt(profile, options)
        return dataclasses.replace(profile, few_shot=())

    def runs(self, profile: Profile, seeds: Sequence[int]) -> Sequence[StudyRun]:
        """Return the runs of both heads on the known classes."""
        return [run_of(bench, label, seed) for seed in seeds for bench in profile.few_shot for label in HEADS]

    def measure(self, lab: Lab) -> dict[str, Any]:
        """Return accuracies by data, head and shots, over the seeds."""
        if lab.options.get("run") is not None:
            return _measure_runs(lab)
        benches: dict[str, Any] = {}
        with lab.console.bar("features", len(lab.profile.few_shot) * len(HEADS) * len(lab.seeds)) as bar:
            done = 0
            for bench in lab.profile.few_shot:
                dataset = apply_view(open_data(bench.config("det")), f"unknown:{bench.every}")
                task = make_task(dataset, lab.profile.shots)
                shots = [count for count in lab.profile.shots if count <= task.shots]
                heads: dict[str, list[list[float]]] = {}
                for label in HEADS:
                    heads[label] = []
                    for seed in lab.seeds:
                        run = run_of(bench, label, seed)
                        lab.cache.result(run)
                        backbone = load_run(lab.cache.directory(run)).model.backbone
                        heads[label].append(accuracies(backbone, seed, dataset, task, shots))
                        done += 1
                        bar.to(done, bench.name)
                benches[bench.name] = {
                    "shots": shots,
                    "classes": int(task.support_ids.max()) + 1,
                    "queries": len(task.query),
                    "accuracy": heads,
                }
        return {"benches": benches, "wanted": list(lab.profile.shots)}

    def tables(self, summary: Summary) -> Sequence[Table]:
        """Return the paper's layout for every dataset."""
        columns = [Column(f"{count}-shot accuracy, %", 2, "higher") for count in summary["wanted"]]
        rows = []
        for name, bench in summary["benches"].items():
            for label in bench["accuracy"]:
                cells = [mean_cell(values_at(bench, label, count), 100) for count in summary["wanted"]]
                rows.append(Row(label, cells, name))
        kind = "classes" if summary.get("existing") else "unknown classes"
        sizes = "; ".join(
            f"{name}: {bench['classes']:,} {kind}, {bench['queries']:,} test examples"
            for name, bench in summary["benches"].items()
        )
        note = f"{sizes}. A dash where less than half of the classes have that many training examples"
        return [Table("Few-shot linear evaluation", columns, rows, note)]

    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw accuracy over shots, a panel for each dataset."""
        panels = {
            f"accuracy on {name}, %": {
                label: [
                    (float(count), [100 * value for value in values_at(bench, label, count)])
                    for count in bench["shots"]
                ]
                for label in bench["accuracy"]
            }
            for name, bench in summary["benches"].items()
        }
        return plot_lines(panels, path, "shots", log_x=True)

    def conclusion(self, summary: Summary) -> str:
        """State the difference for the most shots of every dataset, and all significant differences."""
        if any(not HEADS.keys() <= bench["accuracy"].keys() for bench in summary["benches"].values()):
            return "Without runs of both DET and HET-XL there is nothing to compare; the table has the accuracies."
        parts: list[str] = []
        everything: list[PairedTest | None] = []
        for name, bench in summary["benches"].items():
            tests = [
                against({"a": values_at(bench, "HET-XL", n)}, {"a": values_at(bench, "DET", n)}, "a")
                for n in bench["shots"]
            ]
            everything += tests
            parts.append(f"{change(tests[-1], 2, 100, ' %')} on {name} with {bench['shots'][-1]} shots")
        signs = [sign(test) for test in everything]
        higher = sum(test is not None and test.difference > 0 for test in everything)
        verdict = agree(signs, 1)
        if verdict and higher < len(everything):  # the claim is about all of them
            verdict = None
        return (
            f"HET-XL's accuracy compared with DET's is {'; '.join(parts)}. It is higher in {higher} of {len(signs)} "
            f"comparisons, significantly higher in {signs.count(1)} and significantly lower in {signs.count(-1)}. "
            f"{holds(verdict, self.claim)}"
        )


def _measure_runs(lab: Lab) -> dict[str, Any]:
    """Return accuracies of the features of existing runs, by label and over their seeds, on labelled data."""
    paths = [Path(part.strip()) for part in lab.options["run"].split(",")]
    runs = [run for run in find_runs(paths) if not run.result.get("derived_from")]
    heads: dict[str, list[list[float]]] = {}
    first: tuple[Dataset, Task, list[int]] | None = None
    with lab.console.bar("features", len(runs)) as bar:
        for number, run in enumerate(runs, 1):
            trained = load_run(run.path)
            if first is None:
                first = _task_for(trained, lab)
            dataset, task, shots = first
            _check_input(trained, dataset)
            heads.setdefault(run.label, []).append(
                accuracies(trained.model.backbone, run.seed or 0, dataset, task, shots)
            )
            bar.to(number, run.label)
    assert first is not None
    dataset, task, shots = first
    bench = {"shots": shots, "classes": int(task.support_ids.max()) + 1, "queries": len(task.query), "accuracy": heads}
    return {"benches": {dataset.name: bench}, "wanted": list(lab.profile.shots), "existing": True}


def _task_for(trained: Trained, lab: Lab) -> tuple[Dataset, Task, list[int]]:
    """Open the data as the model of a run reads it, and choose classes and rows."""
    data, spec_options = split_spec(lab.options["data"])
    shape = trained.spec.shape
    image: dict[str, Any] = {"image_size": shape[-1], "grey": shape[0] == 1} if trained.spec.kind == "image" else {}
    image |= spec_options
    dataset = open_dataset(data, **image)
    _check_input(trained, dataset)
    if dataset.multi_label:
        raise ValueError(f"{dataset.name} has lists of labels; few-shot evaluation needs one label for each row")
    task = make_task(dataset, lab.profile.shots)
    return dataset, task, [count for count in lab.profile.shots if count <= task.shots]


def _check_input(trained: Trained, dataset: Dataset) -> None:
    if (trained.spec.kind, tuple(trained.spec.shape)) != (dataset.input.kind, tuple(dataset.input.shape)):
        theirs, ours = (f"{spec.kind} {list(spec.shape)}" for spec in (dataset.input, trained.spec))
        raise ValueError(f"{dataset.name} has {theirs} as inputs, but the run takes {ours}; give data of that shape")


def run_of(bench: Bench, label: str, seed: int) -> StudyRun:
    """Return a head's run on the known classes."""
    head, options = HEADS[label]
    return bench.run(head, seed, view=f"known:{bench.every}", **options)


def values_at(bench: Any, label: str, count: int) -> list[float]:
    """Return accuracies over the seeds with a number of shots; empty if the data has too few examples."""
    if count not in bench["shots"]:
        return []
    column = bench["shots"].index(count)
    return [accuracies[column] for accuracies in bench["accuracy"][label]]


STUDIES = (FewShot(),)
