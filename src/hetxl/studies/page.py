"""The page of a study: our table, the paper's in the same form, a picture, what follows, and how to run it again."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from hetxl.studies.registry import ENTRIES, Entry, minutes_text
from hetxl.studies.study import Study, Summary
from hetxl.studies.tables import Table, markdown
from hetxl.training.files import read_json, write_bytes, write_json


def page(study: Study, entry: Entry, summary: Summary) -> str:
    """The page in markdown.

    Args:
        study: knows its tables and its conclusion.
        entry: of the registry.
        summary: what was found.
    """
    parts = [f"# {entry.title}", study.question, study.conclusion(summary), f"![{entry.title}]({entry.name}.svg)"]
    parts.append("## Here")
    parts += [_table(table) for table in study.tables(summary)]
    parts += ["## In the paper", f"{entry.paper}. The paper concludes that {study.claim}."]
    parts += [_table(table) for table in study.paper_tables()]
    parts += ["## How it was run", how(summary)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(table: Table) -> str:
    note = f"\n\n{table.note[0].upper()}{table.note[1:].rstrip('.')}." if table.note else ""
    return f"**{table.title}**{note}\n\n{markdown(table)}"


def how(summary: Summary) -> str:
    """The command, the seeds and the cost."""
    lines = [f"```\n{summary['command']}\n```", ""]
    seeds = summary["seeds"]
    if summary["trainings"]:
        cost = minutes_text(summary["training_seconds"] / 60)
        lines.append(
            f"Seeds {', '.join(map(str, seeds))}; numbers are means ± standard errors over them, on the test split. "
            f"{summary['trainings']} trainings, which other studies may share, of one thread each: {cost} in all, "
            f"two at a time half of that."
        )
    if summary["measuring_seconds"] >= 1:
        lines.append(f"Measuring took {minutes_text(summary['measuring_seconds'] / 60)} ({summary['machine']}).")
    if summary["form"] != "full":
        lines.append(f"This is the {summary['form']} form of the study: a look, and not a result.")
    return "\n".join(lines)


def publish(files: Mapping[str, Path], target: Path) -> None:
    """Copy a study's files into a folder of pages, and write the index of that folder anew.

    Args:
        files: by the name that they get.
        target: folder.
    """
    for name, source in files.items():
        write_bytes(target / name, source.read_bytes())
    write_bytes(target / "index.md", index(target).encode())


def index(folder: Path) -> str:
    """A page that lists the studies, with links to those that have a page in a folder."""
    lines = [
        "# Studies",
        "",
        "The comparisons of the paper, and some of our own, each one command; `hetxl study --list` shows them too.",
        "",
        "| study | the paper | quick | full |",
        "| --- | --- | ---: | ---: |",
    ]
    for entry in ENTRIES.values():
        name = f"[{entry.name}]({entry.name}.md)" if (folder / f"{entry.name}.md").exists() else f"`{entry.name}`"
        costs = " | ".join(minutes_text(minutes) for minutes in (entry.quick, entry.full))
        lines.append(f"| {name}: {entry.title} | {entry.paper} | {costs} |")
    return "\n".join([*lines, ""])


def write_page(study: Study, entry: Entry, summary: Summary, directory: Path) -> dict[str, Path]:
    """Write summary, picture and page into a directory; the files by the names that `publish` gives them."""
    files = {f"{entry.name}.{ending}": directory / f"{entry.name}.{ending}" for ending in ("json", "svg", "md")}
    write_json(files[f"{entry.name}.json"], summary)
    stored = read_json(files[f"{entry.name}.json"])  # as anyone who reads it later will find it
    study.plot(stored, files[f"{entry.name}.svg"])
    write_bytes(files[f"{entry.name}.md"], page(study, entry, stored).encode())
    return files


def own_page(entry: Entry, text: str, command: str, pictures: Iterable[str] = ()) -> str:
    """The page of a study that writes its own text: that text, its pictures, and the command.

    Args:
        entry: of the registry.
        text: markdown, with a title or without.
        command: that it was run by.
        pictures: files beside the page, shown below the text if it does not show them itself.
    """
    title = "" if text.startswith("# ") else f"# {entry.title}\n\n"
    shown = "".join(f"\n![{entry.title}]({name})\n" for name in pictures if f"({name})" not in text)
    return f"{title}{text.strip()}\n{shown}\n## How it was run\n\n```\n{command}\n```\n"


def publish_own(
    entry: Entry,
    text: str,
    command: str,
    target: Path,
    pictures: Mapping[str, Path],
    numbers: Mapping[str, Path] | None = None,
) -> None:
    """Write such a page into a folder of pages.

    Args:
        entry: of the registry.
        text: see `own_page`.
        command: that it was run by.
        target: folder of pages.
        pictures: by the name that they get.
        numbers: files that the text was made of, by the name that they get.
    """
    write_bytes(target / f"{entry.name}.md", own_page(entry, text, command, pictures).encode())
    publish({**pictures, **(numbers or {})}, target)
