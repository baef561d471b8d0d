"""`hetxl embed`."""

from pathlib import Path
from typing import Annotated

import typer

from hetxl_train.cli.commands import argument, optional


def embed(
    model: Annotated[str, argument("Run directory, timm:NAME, hf:NAME or open_clip:NAME/WEIGHTS.")],
    data: Annotated[str, argument("Data as for hetxl train; with --pairs as for hetxl contrastive train.")],
    *,
    out: Annotated[Path, optional("Directory for the embeddings.")],
    pairs: Annotated[bool, typer.Option("--pairs", help="Read DATA as pairs of images and texts.")] = False,
    text: Annotated[
        str | None, optional("With --pairs: network for the texts [that of the run; without one, texts are copied].")
    ] = None,
    labels: Annotated[bool, typer.Option(help="Whether DATA has labels.")] = True,
    weights: Annotated[
        str, typer.Option(help="published, random, or a .safetensors file of the model's library.")
    ] = "published",
    image_size: Annotated[int | None, optional("Height and width of images [the model's].", min=8)] = None,
    text_length: Annotated[
        int, typer.Option(help="Maximum number of tokens per text; longer texts are cut.", min=1)
    ] = 128,
    workers: Annotated[int, typer.Option(help="Number of processes that decode images.", min=0)] = 2,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, mps, …; auto uses an accelerator if one is available.")
    ] = "auto",
) -> None:
    """Compute the embeddings of a dataset with a trained network, to train heads on.

    Rerun the same command to resume. Under torchrun, the processes divide the rows.
    """
    from hetxl_train.embed import embed as write_vectors

    options = {"pairs": pairs, "text": text, "labels": labels, "weights": weights, "image_size": image_size}
    write_vectors(model, data, out, **options, text_length=text_length, workers=workers, device=device)
