"""`hetxl params`: parameters and training memory of the four heads."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from hetxl.profiling.backbones import build_backbone
from hetxl.profiling.parameters import HeadRow, check_size, compare_heads, format_bytes, format_count
from hetxl.registry import COVARIANCES, RESIDUALS
from hetxl_train import plugins
from hetxl_train.cli.commands import optional
from hetxl_train.report.tables import Table, as_rich, text_table


def params(
    backbone: Annotated[str | None, optional("Backbone: resnet152, vit-l/32, timm:NAME or hf:MODEL_TYPE.")] = None,
    features: Annotated[int | None, optional("Feature size D, for a head without a backbone.")] = None,
    classes: Annotated[int | None, optional("Number of classes K.")] = None,
    rank: Annotated[int | None, optional("Rank R of the covariance [50].")] = None,
    covariance: Annotated[
        str | None, optional(f"Form of the covariance: {', '.join(COVARIANCES)} [efficient].")
    ] = None,
    residual: Annotated[
        str | None, optional(f"Part of the covariance that is added to its factors: {', '.join(RESIDUALS)} [rank1].")
    ] = None,
    noise_features: Annotated[
        int | None, optional("het-xl: size M of a separate noise space [none: the feature space].")
    ] = None,
    buckets: Annotated[int | None, optional("het-h: number of buckets H [D].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the parameters and the training memory of the four heads.

    Pass --classes and either --backbone or --features for your own case. Without options, the command compares its
    counts with the paper's table.
    """
    options = {"rank": rank, "covariance": covariance, "residual": residual}
    options |= {"noise_features": noise_features, "buckets": buckets}
    flags: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if backbone is None and features is None:
        stray = [*(["classes"] if classes is not None else []), *flags]
        if stray:
            raise ValueError(f"{_flag(stray[0])} needs --backbone NAME or --features D")
        tables = plugins.entries("parameter_tables")
        if not tables:
            raise ValueError(f"pass --features D and --classes K; the paper's table {plugins.LAB}")
        for name in tables:
            plugins.load("parameter_tables", name)(as_json)
    else:
        _show_case(backbone, features, classes, flags, as_json)


def _show_case(
    backbone: str | None, features: int | None, classes: int | None, options: dict[str, Any], as_json: bool
) -> None:
    if backbone is not None and features is not None:
        raise ValueError(
            "--backbone and --features exclude each other, because the backbone sets the feature size; pass one"
        )
    if classes is None:
        raise ValueError("--classes is missing; pass the number of classes")
    for name, size in {"features": features, "classes": classes, **options}.items():
        if isinstance(size, int):
            check_size(_flag(name), size, minimum=0 if name == "rank" else 1)
    # The heads are checked before the backbone is built, which takes seconds.
    compare_heads(features or 1, 1, **options)
    base = None if backbone is None else build_backbone(backbone)
    width = base.features if base is not None else features
    assert width is not None
    rows = compare_heads(width, classes, backbone=0 if base is None else base.parameters, **options)
    if as_json:
        case = {"backbone": backbone, "features": width, "classes": classes, "options": options}
        typer.echo(json.dumps({**case, "heads": [row.as_dict() for row in rows]}, indent=2))
        return
    console = Console()
    title = f"Parameters: {backbone or 'head alone'}, D = {width:,}, K = {classes:,}"
    console.print(as_rich(parameter_table(rows, title)))
    console.print(as_rich(memory_table(rows)))
    for row in rows:
        if row.refused is not None:
            console.print(f"{row.head.upper()}: {row.refused}", soft_wrap=True, markup=False, highlight=False)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parameter_table(rows: list[HeadRow], title: str) -> Table:
    """Return the parameters of each head, and what it adds over DET. Noise counts all but the classifier."""
    lines = []
    for row in rows:
        cells = ["–"] * 6
        if row.count is not None and row.added is not None:
            head = row.count.head
            counts = (row.count.backbone, head.classifier, head.total - head.classifier, head.total, row.count.total)
            cells = [*map(format_count, counts), f"{row.added:+.2%}" if row.added else "–"]
        lines.append((row.head.upper(), *cells))
    return text_table(title, ("head", "backbone", "classifier", "noise", "head", "total", "over DET"), lines)


def memory_table(rows: list[HeadRow]) -> Table:
    """Return the memory to train each head with its backbone; the total also in bytes."""
    lines = []
    for row in rows:
        cells = ["–"] * 5
        if row.count is not None:
            memory = row.count.training_bytes
            sizes = (memory.weights, memory.gradients, memory.optimiser, memory.total)
            cells = [*map(format_bytes, sizes), f"{memory.total:,}"]
        lines.append((row.head.upper(), *cells))
    title = "Training memory: float32, Adam, without activations"
    return text_table(title, ("head", "weights", "gradients", "optimiser", "total", "bytes"), lines)
