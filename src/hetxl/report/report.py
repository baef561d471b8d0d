"""The report: one HTML file with everything that some runs have to say."""

import os
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from hetxl.report import details, sections
from hetxl.report import format as form
from hetxl.report.groups import Group, group_runs
from hetxl.report.markup import Markup, join, tag
from hetxl.report.page import page, section
from hetxl.report.palette import styles
from hetxl.report.read import PathLike, Run
from hetxl.report.render import as_html
from hetxl.report.tables import Table, compare_table
from hetxl.report.verdict import verdict

FILE = "report.html"


def write_report(runs: Sequence[Run], path: PathLike, *, made: datetime | None = None) -> Path:
    """Write the report of some runs, whole or not at all.

    Args:
        runs: at least one, all of the same data.
        path: the file to write, or a directory to write `report.html` into.
        made: the time to name in it; now without.

    Returns:
        The file.
    """
    target = Path(path)
    if target.is_dir():
        target = target / FILE
    text = report_html(runs, made=made)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename on the same disk: a reader never sees half a report.
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def report_html(runs: Sequence[Run], *, made: datetime | None = None) -> str:
    """The report of some runs as text.

    Args:
        runs: at least one, all of the same data.
        made: the time to name in it; now without.
    """
    groups = group_runs(runs)
    table = compare_table(runs)
    looks = styles([group.label for group in groups])
    best_nll = next((value for run in runs if (value := run.value("best_nll")) is not None), None)
    order = _order(table)
    title = _title(groups)
    return page(
        title,
        _header(title, groups, made or datetime.now(timezone.utc)),
        section("result", "Result", tag("p", _unbroken(verdict(table)), class_="verdict"), as_html(table)),
        section(
            "training",
            "Training and cost",
            *sections.training(groups, looks, best_nll),
            *sections.cost(groups, looks, table.split),
            plots=True,
            lead=sections.spread(groups),
        ),
        section("calibration", "Calibration", *sections.calibration(groups, looks, table.split), plots=True),
        section("frequency", "Frequent and rare classes", *sections.frequency(groups, looks, table.split), plots=True),
        section("pairs", "Classes that the noise ties together", *details.confusions(groups, order)),
        section("examples", "Examples", *details.examples(groups, order)),
        section("runs", "Runs, configuration and notes", *details.provenance(groups)),
    )


def _order(table: Table) -> list[str]:
    """Labels by their NLL, best first."""
    return [row.label for row in sorted(table.heads, key=lambda row: row.nll)]


def _title(groups: Sequence[Group]) -> str:
    dataset = next((run.dataset for group in groups for run in group.runs if run.dataset), None)
    what = form.listed([group.label for group in groups]) if len(groups) <= 4 else f"{len(groups)} heads"
    return f"{what} on {dataset}" if dataset else what


def _header(title: str, groups: Sequence[Group], made: datetime) -> Markup:
    runs = [run for group in groups for run in group.runs]
    unfinished = sum(not run.finished for run in runs)
    going = f", {unfinished} of them not finished" if unfinished else ""
    if len(runs) == unfinished == 1:
        going = " that is not finished"
    facts = [*_data_facts(runs), f"made {made:%Y-%m-%d %H:%M} {made:%Z} from {form.plural(len(runs), 'run')}{going}"]
    named = [group.label + (f" × {len(group.runs)}" if len(group.runs) > 1 else "") for group in groups]
    names = tag("p", f"Runs: {form.listed(named)}; they are listed at the end.", class_="note names")
    return tag(
        "header", tag("h1", title), tag("p", join([tag("span", fact) for fact in facts], " · "), class_="facts"), names
    )


def _data_facts(runs: Sequence[Run]) -> list[str]:
    """Classes and rows, from the first run that describes its data."""
    data = next((run.data for run in runs if run.data), {})
    facts = []
    classes = form.finite(data.get("classes"))
    if classes is not None:
        facts.append(f"{form.count(classes)} classes")
    rows = data.get("rows")
    if isinstance(rows, dict):
        sizes = {str(name): form.finite(size) for name, size in rows.items()}
        parts = [
            f"{form.count(size)} {'training' if name == 'train' else name}" for name, size in sizes.items() if size
        ]
        if parts:
            facts.append(f"{form.listed(parts)} examples")
    return facts


def _unbroken(text: str) -> str:
    """A text whose numbers stay together where lines break."""
    for sign in ("±", "<", "="):
        text = text.replace(f" {sign} ", f"\N{NO-BREAK SPACE}{sign}\N{NO-BREAK SPACE}")
    return text
