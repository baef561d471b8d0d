"""`hetxl evaluate`."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hetxl.cli.errors import one_line_errors


def evaluate(
    run: Annotated[str, typer.Argument(help="Directory of a run.", show_default=False)],
    data: Annotated[
        str | None, typer.Argument(help="Other data with labels; the run's own without.", show_default=False)
    ] = None,
    *,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    labels: Annotated[str | None, typer.Option(help="File with the labels of DATA.", show_default=False)] = None,
    method: Annotated[str, typer.Option(help="mc, deterministic, mean_field, probit or taylor.")] = "mc",
    num_samples: Annotated[int | None, typer.Option(help="S [as trained].", show_default=False)] = None,
    examples: Annotated[int, typer.Option(help="At most this many; 0 for all.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, … or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Metrics of a trained run on its test split, or on other data of the same classes."""
    with one_line_errors():
        from hetxl.training.evaluation import evaluate_run

        found = evaluate_run(
            run,
            data,
            split=split,
            labels=labels,
            method=method,
            num_samples=num_samples,
            limit=examples,
            device=device,
        )
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        table = Table("metric", "value", title=f"{run} on {data or split}", box=None)
        for name, value in found.items():
            table.add_row(name, "–" if value is None else f"{value:,.4g}")
        Console().print(table)
