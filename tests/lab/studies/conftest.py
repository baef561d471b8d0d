"""Miniature runs of the studies, each once for all tests, and made-up results."""

import json

import pytest

from hetxl_lab.studies.registry import ENTRIES
from hetxl_lab.studies.run import run_study
from hetxl_train.console import Console
from support.pairs import vectors_file

LEVERS_DATA = "synthetic:rows=800,classes=8,features=5"
LEVERS = "residual,temperature-hold,temperature-held-out,features,link"


class Studied:
    """Runs studies in miniature, each once; all share one cache of runs."""

    def __init__(self, root):
        self.root, self.cache, self.pages = root, root / "cache", {}
        self.pairs = vectors_file(root / "pairs.npz", captions=True)

    def __call__(self, name):
        """The page of a study, and its summary."""
        if name not in self.pages:
            page = self.run(name, self.root / name)
            assert page.with_suffix(".svg").read_text().startswith("<svg")
            self.pages[name] = (page.read_text(), json.loads(page.with_suffix(".json").read_text()))
        return self.pages[name]

    def result(self, run):
        """The result of a run, by the name of its directory."""
        return json.loads((self.cache / run / "result.json").read_text())

    def run(self, name, out, **more):
        """Run a study, whose data and options are small."""
        options = {"levers": {"data": LEVERS_DATA, "levers": LEVERS}, "defaults": {"heads": "det,het-xl"}}.get(name, {})
        if ENTRIES[name].module in ("pairs", "locked_towers"):
            options = {"data": str(self.pairs)}
        common = {"cache": self.cache, "jobs": 1, "console": Console(quiet=True), "options": options}
        return run_study(name, profile="miniature", out=out, **(common | more))


@pytest.fixture(scope="session")
def studied(tmp_path_factory):
    """See `Studied`."""
    return Studied(tmp_path_factory.mktemp("studies"))


@pytest.fixture(scope="session")
def made_up():
    """A function from a mean NLL to values over three seeds, as `over_seeds` gives them."""

    def make(nll, *, precision=0.5, temperature=1.0, seconds=10.0, parameters=1_000_000, steps=100):
        spread = (-0.01, 0.0, 0.011)
        return {
            "nll": [nll + shift for shift in spread],
            "precision@1": [precision + shift for shift in spread],
            "temperature": [temperature] * 3,
            "train_seconds": [seconds] * 3,
            "parameters": parameters,
            "steps": steps,
            "seeds": [0, 1, 2],
        }

    return make


@pytest.fixture(scope="session")
def pair_runs():
    """A function from settings and mean zero-shot accuracies to a summary of a study on pairs, with three seeds."""

    def make(accuracies, **more):
        runs = {}
        for index, (setting, value) in enumerate(accuracies.items()):
            # Differences vary a little from seed to seed, as they do.
            spread = (-0.01 - 1e-4 * index, 0.0, 0.011 + 1e-4 * index)
            names = ("zero_shot_top1", "zero_shot_top5", "validation_image_to_text@1")
            runs[setting] = None if value is None else {key: [value + shift for shift in spread] for key in names}
        common = {"data": "some", "rows": {"train": 1000}, "classes": 50, "steps": 7, "samples": 22, "seeds": [0, 1, 2]}
        return {**common, "runs": runs, **more}

    return make


@pytest.fixture(scope="session")
def lines(made_up):
    """A function from (label, group) and mean NLLs to a summary of lines."""

    def make(values, **more):
        rows = []
        for (label, group), nll in values.items():
            metrics = made_up(nll) if isinstance(nll, float) else nll
            if metrics is not None:  # differences vary a little from seed to seed, as they do
                metrics = {
                    **metrics,
                    "nll": [loss + 1e-4 * index * len(rows) for index, loss in enumerate(metrics["nll"])],
                }
            rows.append({"label": label, "group": group, "data": "some data", "values": metrics})
        return {"study": "made up", "lines": rows, **more}

    return make
