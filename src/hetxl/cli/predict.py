"""`hetxl predict`."""

from pathlib import Path
from typing import Annotated

import typer

from hetxl.cli.errors import one_line_errors


def predict(
    run: Annotated[str, typer.Argument(help="Directory of a run.", show_default=False)],
    inputs: Annotated[
        str, typer.Argument(metavar="INPUT", help="Arrays, a picture, a folder or a manifest.", show_default=False)
    ],
    *,
    out: Annotated[Path, typer.Option(help="File to write: .csv, .jsonl or .parquet.", show_default=False)],
    top_k: Annotated[int, typer.Option(help="How many classes for each input.")] = 5,
    method: Annotated[str, typer.Option(help="mc, deterministic, mean_field, probit or taylor.")] = "mc",
    num_samples: Annotated[int | None, typer.Option(help="S [as trained].", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that decode pictures.")] = 2,
    device: Annotated[str, typer.Option(help="cpu, cuda, … or auto.")] = "auto",
) -> None:
    """Write the top classes of new inputs with probabilities, entropy and what each is confused with."""
    with one_line_errors():
        from hetxl.training.predict import predict as run_prediction

        written = run_prediction(
            run,
            inputs,
            out,
            top_k=top_k,
            method=method,
            num_samples=num_samples,
            seed=seed,
            workers=workers,
            device=device,
        )
        typer.echo(f"{written:,} rows in {out}")
