"""`hetxl study NAME`: train what is missing, measure, and write the page."""

import dataclasses
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hetxl.functional._checks import one_of
from hetxl.studies.cache import Cache
from hetxl.studies.forms import FORMS
from hetxl.studies.page import publish, write_page
from hetxl.studies.pair_study import PairStudy, variant_of
from hetxl.studies.plot import new_figure
from hetxl.studies.pool import run_trainings
from hetxl.studies.registry import ENTRIES, load_study
from hetxl.studies.study import Lab
from hetxl.training.progress import Narrator

ROOT = Path("runs") / "studies"
"""Of the results of studies, unless told."""


def run_study(
    name: str,
    *,
    form: str = "full",
    seeds: Sequence[int] | None = None,
    out: Path | None = None,
    write: Path | None = None,
    cache: Path | None = None,
    data: str | None = None,
    jobs: int | None = None,
    narrator: Narrator | None = None,
) -> Path:
    """Run a study; trainings that are done are not done again, whichever study asked for them.

    Args:
        name: of the registry, one that has a module.
        form: "full", "quick" or "miniature".
        seeds: of the trainings; as many as the form has without.
        out: directory of the results; runs/studies/NAME without.
        write: folder of pages that the results are copied to, such as docs/studies; None for none.
        cache: directory of the trainings; that of the study without.
        data: of a study on pairs, as for `hetxl contrastive train`; that of the form without.
        jobs: trainings at a time; one a core without.
        narrator: tells how far it is.

    Returns:
        The page; NAME.json with all numbers and NAME.svg are beside it.
    """
    study, entry = load_study(name), ENTRIES[name]
    one_of("form", form, FORMS)
    chosen = FORMS[form]
    if data is not None:
        if not isinstance(study, PairStudy):
            raise ValueError(f"data={data!r} is for studies on pairs; {name} has its own")
        chosen = dataclasses.replace(chosen, pairs=dataclasses.replace(chosen.pairs, data=data))
    seeds = study.seeds(chosen) if seeds is None else tuple(seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, found {list(seeds)}")
    new_figure(1, 1)  # whether there is matplotlib is better known now
    directory = ROOT / f"{name}{variant_of(chosen)}" if out is None else out
    lab = Lab(chosen, seeds, Cache(cache or study.home(chosen)), narrator or Narrator())
    wanted = list(study.trainings(chosen, seeds))
    run_trainings(wanted, lab.cache, jobs=jobs, narrator=lab.narrator)
    while more := [one for one in study.follow_ups(lab) if one not in wanted]:
        run_trainings(more, lab.cache, jobs=jobs, narrator=lab.narrator)
        wanted += more
    begin = time.perf_counter()
    found = study.measure(lab)
    results = [lab.cache.result(one) for one in {one.key: one for one in wanted}.values()]
    summary = {
        "study": name,
        "form": form,
        "seeds": list(seeds),
        "command": command(name, form, seeds, data),
        "machine": f"{platform.machine()} CPU, torch {torch.__version__.partition('+')[0]}",
        "trainings": len(results),
        "training_seconds": sum(one["train_seconds"] + one["evaluate_seconds"] for one in results if one is not None),
        "measuring_seconds": time.perf_counter() - begin,
        **found,
    }
    files = write_page(study, entry, summary, directory)
    if write is not None:
        publish(files, write)
    return files[f"{name}.md"]


def command(name: str, form: str, seeds: Sequence[int], data: str | None = None) -> str:
    """What to type for the same study."""
    parts = ["hetxl study", name]
    if data is not None:
        parts.append(data)
    if form == "quick":
        parts.append("--quick")
    if tuple(seeds) != load_study(name).seeds(FORMS[form]):
        first = tuple(range(len(seeds))) == tuple(seeds)
        # The comma tells which from how many.
        end = "," if len(seeds) == 1 else ""
        parts.append(f"--seeds {len(seeds)}" if first else f"--seeds {','.join(map(str, seeds))}{end}")
    return " ".join(parts)
