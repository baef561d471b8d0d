"""Miniature runs of the studies, each once for all tests, and made-up results."""

import json

import pytest

from hetxl.studies.registry import ENTRIES
from hetxl.studies.run import run_study
from hetxl.training.progress import Narrator
from support.pairs import vectors_file


class Studied:
    """Runs studies in miniature, each once; all share one cache of trainings."""

    def __init__(self, root):
        self.root, self.cache, self.found = root, root / "cache", {}
        self.pairs = vectors_file(root / "pairs.npz", captions=True)

    def __call__(self, name):
        """The page of a study, and its summary."""
        if name not in self.found:
            options = {"out": self.root / name, "cache": self.cache, "jobs": 1, "narrator": Narrator(quiet=True)}
            if ENTRIES[name].pairs:
                options["data"] = str(self.pairs)
            page = run_study(name, form="miniature", **options)
            assert page.with_suffix(".svg").read_text().count("<svg") == 1
            self.found[name] = (page.read_text(), json.loads(page.with_suffix(".json").read_text()))
        return self.found[name]


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
            "nll": [nll + one for one in spread],
            "precision@1": [precision + one for one in spread],
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
        for place, (setting, value) in enumerate(accuracies.items()):
            # Differences vary a little from seed to seed, as they do.
            spread = (-0.01 - 1e-4 * place, 0.0, 0.011 + 1e-4 * place)
            names = ("zero_shot_top1", "zero_shot_top5", "validation_image_to_text@1")
            runs[setting] = None if value is None else {key: [value + one for one in spread] for key in names}
        common = {"data": "some", "rows": {"train": 1000}, "classes": 50, "steps": 7, "samples": 22, "seeds": [0, 1, 2]}
        return {**common, "runs": runs, **more}

    return make


@pytest.fixture(scope="session")
def lines(made_up):
    """A function from (label, group) and mean NLLs to a summary of lines."""

    def make(values, **more):
        rows = []
        for (label, group), nll in values.items():
            found = made_up(nll) if isinstance(nll, float) else nll
            if found is not None:  # differences vary a little from seed to seed, as they do
                found = {**found, "nll": [one + 1e-4 * place * len(rows) for place, one in enumerate(found["nll"])]}
            rows.append({"label": label, "group": group, "data": "some data", "values": found})
        return {"study": "made up", "lines": rows, **more}

    return make
