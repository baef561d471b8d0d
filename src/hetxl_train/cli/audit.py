"""`hetxl audit`, and `hetxl audit apply`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hetxl_train.cli.commands import SectionedCommand, argument, optional
from hetxl_train.cli.options import Settings, config_flags, resolve_preset
from hetxl_train.cli.train import DATA
from hetxl_train.config import TrainConfig


class _DataFirst(TyperGroup):
    """A group whose first argument may be data: `hetxl audit DATA` is `hetxl audit find DATA`."""

    default = "find"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the default command in front of data."""
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


audit = typer.Typer(cls=_DataFirst, no_args_is_help=True, rich_markup_mode=None, add_completion=False)


@audit.callback()
def _group() -> None:
    """Find labels that are probably wrong, and correct them.

    hetxl audit DATA --out DIR ranks the labels; hetxl audit apply corrects them in a new file.
    """


@audit.command(cls=SectionedCommand)
@config_flags(without=("data", "out", "validation", "test"))
def find(
    data: Annotated[str, argument(DATA)],
    *,
    out: Annotated[Path, optional("Directory for audit.csv and audit.html.")],
    folds: Annotated[int, typer.Option(help="Number of folds of the cross-fit.")] = 4,
    run: Annotated[str | None, optional("Run that has not seen DATA, in the place of the folds.")] = None,
    settings: Settings = (None, {}),
) -> None:
    """Rank the labels of DATA by how likely they are wrong; `hetxl audit DATA` for short.

    A run is trained for each fold on the other rows, so that no row is judged by a model that has seen it. DIR gets
    audit.csv, audit.parquet, audit.json, and audit.html to decide in. Rerun the same command to resume.
    """
    from hetxl_train.audit import audit_data

    config = resolve_preset(settings, data, TrainConfig, instead={"out": "--out"})
    result = audit_data(config, out, folds=folds, run=run)
    typer.echo(f"{result.audit.suspects:,} of {len(result.audit):,} labels are suspects; see {out / 'audit.csv'}")
    typer.echo(f"Decide in {out / 'audit.html'}, then run hetxl audit apply decisions.csv --audit {out} --out FILE")


@audit.command(cls=SectionedCommand)
def apply(
    decisions: Annotated[Path | None, argument("decisions.csv, saved from audit.html.")] = None,
    *,
    directory: Annotated[
        Path | None, typer.Option("--audit", help="Directory of the audit [that of decisions.csv].", show_default=False)
    ] = None,
    top: Annotated[
        float | None, optional("Without decisions: correct this share of all labels, the most suspicious.")
    ] = None,
    out: Annotated[Path, optional("File to write: .csv (images, texts) or .npz (arrays).")],
) -> None:
    """Write the audited data with corrected labels to a new file; the original is not changed."""
    from hetxl_train.audit import apply_decisions

    if directory is None:
        if decisions is None:
            raise ValueError("--audit DIR is missing: the directory that hetxl audit wrote")
        directory = decisions.parent
    changed, rows = apply_decisions(directory, out, decisions=decisions, top=top)
    typer.echo(f"{changed:,} of {rows:,} rows have other labels in {out}")
