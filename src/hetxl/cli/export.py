"""`hetxl export`."""

from pathlib import Path
from typing import Annotated

import typer

from hetxl.cli.errors import one_line_errors


def export(
    run: Annotated[str, typer.Argument(help="Directory of a run.", show_default=False)],
    *,
    to: Annotated[str, typer.Option(help="onnx, torch (torch.export), or head (the head alone).")] = "onnx",
    method: Annotated[
        str | None, typer.Option(help="mc, deterministic, mean_field, probit or taylor [mc].", show_default=False)
    ] = None,
    samples: Annotated[int | None, typer.Option(help="S of mc [as trained].", show_default=False)] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Only the most probable classes and their ids [all].", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write [model.onnx, model.pt2 or head.safetensors in RUN].", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of mc's fixed noise [0].", show_default=False)] = None,
) -> None:
    """Write a trained model as one file for another program: ONNX, torch.export, or the head alone."""
    with one_line_errors():
        from hetxl.integrations.export_run import export_run
        from hetxl.profiling.parameters import format_bytes

        written = export_run(run, to, out=out, method=method, num_samples=samples, top_k=top_k, seed=seed)
        typer.echo(f"{written.path}: {format_bytes(written.size)}, {written.what}")
        if written.difference is None:
            typer.echo("Not compared: pip install onnxruntime, which does it", err=True)
        else:
            how = f"within {written.difference:.0e} of" if written.difference else "the same, to the bit, as"
            typer.echo(f"Its probabilities are {how} predict's")
