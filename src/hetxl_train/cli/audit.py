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
    """A group whose first argument may be data: `hetxl audit DATA` means `hetxl audit find DATA`."""

    default = "find"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the name of the default command before data."""
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


audit = typer.Typer(cls=_DataFirst, no_args_is_help=True, rich_markup_mode=None, add_completion=False)


@audit.callback()
def _group() -> None:
    """Find labels that are probably wrong, and correct them.

    hetxl audit DATA --out DIR ranks the labels; hetxl audit apply writes a copy of the data with corrected labels.
    """


@audit.command(cls=SectionedCommand)
@config_flags(without=("data", "out", "validation", "test"))
def find(
    data: Annotated[str, argument(DATA)],
    *,
    out: Annotated[Path, optional("Directory for audit.csv and audit.html.")],
    folds: Annotated[int, typer.Option(help="Number of folds; each is judged by a run trained on the others.")] = 4,
    run: Annotated[
        str | None, optional("Judge labels with this run, which must not have seen DATA [train one run per fold].")
    ] = None,
    settings: Settings = (None, {}),
) -> None:
    """Rank the labels of DATA by how likely they are wrong (short form: hetxl audit DATA).

    Each fold is judged by a run that is trained on the other folds, so no row is judged by a model that has seen it.
    Writes audit.csv, audit.parquet, audit.json, and audit.html, a page to review the labels on. Rerun the same command
    to resume.
    """
    from hetxl_train.audit import audit_data

    config = resolve_preset(settings, data, TrainConfig, instead={"out": "--out"})
    result = audit_data(config, out, folds=folds, run=run)
    typer.echo(f"{result.audit.suspects:,} of {len(result.audit):,} labels are suspect; see {out / 'audit.csv'}")
    typer.echo(
        f"Review them in {out / 'audit.html'}, then run hetxl audit apply decisions.csv --audit {out} --out FILE"
    )


@audit.command(cls=SectionedCommand)
def apply(
    decisions: Annotated[Path | None, argument("Decisions saved from audit.html, as decisions.csv.")] = None,
    *,
    directory: Annotated[
        Path | None,
        typer.Option("--audit", help="Directory of the audit [the directory of decisions.csv].", show_default=False),
    ] = None,
    top: Annotated[
        float | None, optional("Without decisions.csv: correct this share of all labels, the most suspicious first.")
    ] = None,
    out: Annotated[Path, optional("File to write: .csv (images, texts) or .npz (arrays).")],
) -> None:
    """Write a copy of the audited data with corrected labels; the original is not changed."""
    from hetxl_train.audit import apply_decisions

    if directory is None:
        if decisions is None:
            raise ValueError("--audit DIR is missing; pass the directory that hetxl audit wrote")
        directory = decisions.parent
    changed, rows = apply_decisions(directory, out, decisions=decisions, top=top)
    typer.echo(f"Wrote {out}: {changed:,} of {rows:,} labels changed")
