"""`hetxl study NAME`: train what is missing, measure, and write the page."""

import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hetxl._checks import one_of
from hetxl._files import read_json, write_bytes, write_json
from hetxl_lab.studies.profiles import PROFILES
from hetxl_lab.studies.registry import ENTRIES, load_study, minutes_text
from hetxl_lab.studies.runs import RunCache
from hetxl_lab.studies.study import Lab, Study, Summary, directory_suffix
from hetxl_lab.studies.verdicts import markdown
from hetxl_train.console import Console
from hetxl_train.process_pool import check_jobs

ROOT = Path("runs") / "studies"  # of the results of studies by default


def run_study(
    name: str,
    *,
    profile: str = "full",
    seeds: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    out: Path | None = None,
    write: Path | None = None,
    cache: Path | None = None,
    jobs: int | None = None,
    console: Console | None = None,
) -> Path:
    """Run a study and return its page; NAME.json with all numbers and the image are next to it.

    Cached runs are reused, whichever study trained them. None means the default of the study for seeds, the directory
    of the results (runs/studies/NAME) and of the runs, and one job per core.

    Args:
        name: name in the registry.
        profile: "full", "quick" or "miniature".
        options: options of the study, as declared in its entry.
        write: directory of pages that the results are copied to, such as lab/docs/studies; None for none.
    """
    study, entry = load_study(name), ENTRIES[name]
    one_of("profile", profile, PROFILES)
    chosen = study.normalised(entry.with_defaults(dict(options or {})))
    adapted = study.adapt(PROFILES[profile], chosen)
    seeds = study.seeds(adapted) if seeds is None else tuple(seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, found {list(seeds)}")
    check_jobs(jobs)
    usual = next((option.default for option in entry.options if option.name == "data"), None)
    suffix = directory_suffix(profile, None if chosen.get("data") == usual else chosen["data"])
    directory = ROOT / f"{name}{suffix}" if out is None else out
    lab = Lab(adapted, seeds, RunCache(cache or study.home(adapted)), chosen, directory, jobs, console or Console())
    study.check(lab)
    lab.run(study.runs(adapted, seeds))
    begin, before = time.perf_counter(), lab.training_time
    measurements = study.measure(lab)
    measuring = time.perf_counter() - begin - (lab.training_time - before)
    results = [lab.cache.result(run) for run in lab.trained.values()]
    finite = [result for result in results if result is not None]
    summary = {
        "study": name,
        "form": profile,
        "seeds": list(seeds),
        "command": command(name, profile, seeds, chosen),
        "machine": f"{platform.machine()} CPU, torch {torch.__version__.partition('+')[0]}",
        "trainings": len(results),
        "training_seconds": sum(result["train_seconds"] + result["evaluate_seconds"] for result in finite),
        "measuring_seconds": measuring,
        **measurements,
    }
    files = write_page(study, summary, directory)
    if write is not None:
        publish(files, write)
    return files[f"{name}.md"]


def command(name: str, profile: str, seeds: Sequence[int], options: Mapping[str, Any] | None = None) -> str:
    """Return the command for the same study."""
    parts, flags = ["hetxl study", name], []
    for option in ENTRIES[name].options:
        value = (options or {}).get(option.name, option.default)
        flag = option.name.replace("_", "-")
        if value == option.default:
            continue
        if option.positional:
            parts.append(str(value))
        elif option.type is bool:
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag} {value}")
    if profile == "quick":
        parts.append("--quick")
    if tuple(seeds) != load_study(name).seeds(PROFILES[profile]):
        first = tuple(range(len(seeds))) == tuple(seeds)
        # The comma distinguishes a seed from a number of seeds.
        end = "," if len(seeds) == 1 else ""
        parts.append(f"--seeds {len(seeds)}" if first else f"--seeds {','.join(map(str, seeds))}{end}")
    return " ".join([*parts, *flags])


def page(study: Study, summary: Summary) -> str:
    """Return the page of a study in markdown: its text, and how it was run."""
    return f"{study.text(summary).strip()}\n\n## How it was run\n\n{how(summary, study.split)}\n"


def how(summary: Summary, split: str = "test") -> str:
    """Return the command, the seeds and the cost, if the summary has them."""
    lines = [f"```\n{summary['command']}\n```", ""]
    if summary.get("trainings"):
        cost = minutes_text(summary["training_seconds"] / 60)
        lines.append(
            f"Seeds {', '.join(map(str, summary['seeds']))}; numbers are means ± standard errors over them, on the "
            f"{split} split. {summary['trainings']} runs, which other studies may share, of one thread each: {cost} in "
            f"all, two at a time half of that."
        )
    if summary.get("measuring_seconds", 0) >= 1:
        lines.append(f"Measuring took {minutes_text(summary['measuring_seconds'] / 60)} ({summary['machine']}).")
    if summary["form"] != "full":
        lines.append(f"This is the {summary['form']} profile of the study: a look, not a result.")
    return "\n".join(lines).strip()


def write_page(study: Study, summary: Summary, directory: Path) -> dict[str, Path]:
    """Write summary, image and page into a directory; return them by the names that `publish` gives them."""
    name = study.name
    files = {f"{name}.{ending}": directory / f"{name}.{ending}" for ending in ("json", "svg", "md")}
    write_json(files[f"{name}.json"], summary)
    stored = read_json(files[f"{name}.json"])  # the page uses the values as stored
    study.plot(stored, files[f"{name}.svg"])
    write_bytes(files[f"{name}.md"], page(study, stored).encode())
    return files


def publish(files: Mapping[str, Path], target: Path) -> None:
    """Copy files, by their new names, to a directory of pages, and rewrite its index."""
    for name, source in files.items():
        write_bytes(target / name, source.read_bytes())
    write_bytes(target / "index.md", index(target).encode())


def index(folder: Path) -> str:
    """Return a page that lists the studies, with links to those that have a page in a directory."""
    rows = []
    for entry in ENTRIES.values():
        name = f"[{entry.name}]({entry.name}.md)" if (folder / f"{entry.name}.md").exists() else f"`{entry.name}`"
        costs = [minutes_text(minutes) for minutes in (entry.quick, entry.full)]
        rows.append([f"{name}: {entry.title}", entry.paper, *costs])
    about = "The comparisons of the paper, and some of our own, each one command; `hetxl study --list` shows them too."
    return f"# Studies\n\n{about}\n\n{markdown(['study', 'the paper', 'quick', 'full'], rows)}"
