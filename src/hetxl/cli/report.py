"""`hetxl report`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hetxl.cli.errors import one_line_errors


def report(
    runs: Annotated[list[str], typer.Argument(help="Directories of runs or comparisons.", show_default=False)],
    *,
    out: Annotated[
        Path | None, typer.Option(help="File to write [report.html in the first directory].", show_default=False)
    ] = None,
) -> None:
    """Write report.html: one file, readable without a network, with every plot and table of some runs."""
    with one_line_errors():
        from hetxl.report import as_rich, compare_table, find_runs, write_report

        found = find_runs(runs)
        Console().print(as_rich(compare_table(found)))
        typer.echo(f"Report: {write_report(found, out or Path(runs[0]) / 'report.html')}")
