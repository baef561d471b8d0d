"""`hetxl rescale`."""

from pathlib import Path
from typing import Annotated

import typer

from hetxl.cli.errors import one_line_errors


def rescale(
    run: Annotated[str, typer.Argument(help="Directory of a run.", show_default=False)],
    *,
    validation: Annotated[
        str | None, typer.Option(help="Data with labels to fit to [the run's validation split].", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the new run [RUN-scaled].", show_default=False)] = None,
    noise: Annotated[bool, typer.Option(help="Also fit the scale of the noise.")] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda, … or auto.")] = "auto",
) -> None:
    """Fit τ and the scale of the noise of a trained run to labels that you trust; the result is a run of its own."""
    with one_line_errors():
        from hetxl.training.rescale import rescale_run

        typer.echo(str(rescale_run(run, out, validation=validation, noise=noise, device=device).path))
