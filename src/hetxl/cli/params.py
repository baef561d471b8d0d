"""`hetxl params`: how large the four heads are."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from hetxl.cli.errors import one_line_errors
from hetxl.profiling.backbones import build_backbone
from hetxl.profiling.paper import compare_with_paper, paper_table
from hetxl.profiling.parameters import check_size, compare_heads, memory_table, parameter_table


def params(
    backbone: Annotated[
        str | None, typer.Option(help="resnet152, vit-l/32, timm:NAME or hf:MODEL_TYPE.", show_default=False)
    ] = None,
    features: Annotated[
        int | None, typer.Option(help="Feature size D, for a head without a backbone.", show_default=False)
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes K.", show_default=False)] = None,
    rank: Annotated[int | None, typer.Option(help="Rank R of the covariance [50].", show_default=False)] = None,
    covariance: Annotated[
        str | None, typer.Option(help="efficient, low_rank, diagonal or full [efficient].", show_default=False)
    ] = None,
    residual: Annotated[str | None, typer.Option(help="rank1 or diagonal [rank1].", show_default=False)] = None,
    noise_features: Annotated[
        int | None, typer.Option(help="HET-XL: size M of a noise space of its own.", show_default=False)
    ] = None,
    buckets: Annotated[int | None, typer.Option(help="HET-H: buckets H [D].", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Parameters and training memory of the four heads.

    Without options: the paper's table, ours beside it. With --backbone or --features, and --classes: your own case.
    """
    options = {
        "rank": rank,
        "covariance": covariance,
        "residual": residual,
        "noise_features": noise_features,
        "buckets": buckets,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    with one_line_errors():
        if backbone is None and features is None:
            stray = [*(["classes"] if classes is not None else []), *given]
            if stray:
                raise ValueError(f"{_flag(stray[0])} needs --backbone NAME or --features D beside it")
            _show_paper(as_json)
        else:
            _show_case(backbone, features, classes, given, as_json)


def _show_paper(as_json: bool) -> None:
    cells = compare_with_paper()
    if as_json:
        typer.echo(json.dumps([cell.as_dict() for cell in cells], indent=2))
    else:
        Console().print(paper_table(cells))


def _show_case(
    backbone: str | None, features: int | None, classes: int | None, options: dict[str, Any], as_json: bool
) -> None:
    if backbone is not None and features is not None:
        raise ValueError("--backbone and --features exclude each other: a backbone states its own feature size")
    if classes is None:
        raise ValueError("--classes K is missing: how many classes the head tells apart")
    for name, size in {"features": features, "classes": classes, **options}.items():
        if isinstance(size, int):
            check_size(_flag(name), size, minimum=0 if name == "rank" else 1)
    # The heads are checked before the backbone is built: a wrong option should not take seconds to say so.
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
    console.print(parameter_table(rows, f"Parameters: {backbone or 'head alone'}, D = {width:,}, K = {classes:,}"))
    console.print(memory_table(rows))
    for row in rows:
        if row.refused is not None:
            console.print(f"{row.head.upper()}: {row.refused}", soft_wrap=True, markup=False, highlight=False)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
