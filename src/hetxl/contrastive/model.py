"""Two towers with a contrastive loss, as one module: what is trained, saved and evaluated."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hetxl.contrastive.config import ContrastiveConfig
from hetxl.contrastive.loss import ContrastiveLoss
from hetxl.contrastive.ngrams import Bags
from hetxl.contrastive.texts import TextTable
from hetxl.contrastive.towers import image_tower, text_tower
from hetxl.data.broken import BrokenLimit
from hetxl.data.dataset import InputSpec
from hetxl.data.pairs import PairSplit
from hetxl.training.order import derive
from hetxl.training.reading import reader

BLOCK = 512
"""Pictures or texts that go through a tower at a time, outside of training."""


class TwoTowers(nn.Module):
    """loss = loss(image tower(pictures), text tower(texts)).

    Args:
        image: pictures or their vectors to [B, D]
        text: bags of n-grams or vectors to [B, D]
        loss: of pairs of embeddings.
    """

    def __init__(self, image: nn.Module, text: nn.Module, loss: ContrastiveLoss):
        super().__init__()
        self.image, self.text, self.loss = image, text, loss

    def forward(self, images: Tensor, texts: Bags | Tensor, **options: Any) -> Tensor:
        """The loss of a batch of pairs; options as of the loss."""
        return self.loss(self.image(images), self.text(texts), **options)


class Specs(NamedTuple):
    """What the towers get.

    Attributes:
        image: an image, or features where the tower is locked.
        text: features where the tower is locked; None for texts.
    """

    image: InputSpec
    text: InputSpec | None


class Embedded(NamedTuple):
    """Pairs as the towers give them, before anything is normalised.

    Attributes:
        images: [n, D]
        texts: [n, D]
        rows: [n] int64, which pairs they are; pictures that cannot be read are left out.
    """

    images: Tensor
    texts: Tensor
    rows: np.ndarray


def build_towers(config: ContrastiveConfig, specs: Specs, **options: Any) -> TwoTowers:
    """The model with the initial weights of the configuration's seed.

    The towers are the same for every head of a seed: each part is drawn from a seed of its own.

    Args:
        config: of the run.
        specs: what the towers get.
        **options: of the loss, beyond those of the configuration.
    """
    locked = specs.image.kind == "features", specs.text is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, 20))
        image = image_tower(specs.image, config.features, config.width, config.depth)
        torch.manual_seed(derive(config.seed, 21))
        text = text_tower(
            specs.text,
            config.features,
            buckets=config.buckets,
            embedding=config.embedding,
            width=config.text_width,
            depth=config.text_depth,
            dropout=config.dropout,
            # As in LiT, the layer is behind the images where both sides are locked and of the same size.
            project=not (all(locked) and specs.text is not None and specs.text.shape[0] == config.features),
        )
        torch.manual_seed(derive(config.seed, 22))
        loss = ContrastiveLoss(
            config.features,
            link=config.link,  # pyright: ignore[reportArgumentType]
            noise=config.noise_side,  # pyright: ignore[reportArgumentType]
            covariance=config.covariance,
            rank=config.rank,
            residual=config.residual,
            noise_init=config.noise_init,
            noise_group=config.noise_group,
            samples=config.samples,
            normalize=config.normalize,  # pyright: ignore[reportArgumentType]
            scale_init=config.scale_init,
            bias_init=config.bias_init,
            max_scale=config.max_scale,
            **options,
        )
    return TwoTowers(image, text, loss)


@torch.no_grad()
def embed_texts(model: TwoTowers, table: TextTable, places: np.ndarray, template: int = 0) -> Tensor:
    """Embeddings of texts as the tower gives them, [n, D], in blocks.

    Args:
        model: in evaluation mode.
        table: of the texts.
        places: [n]
        template: which of the templates.
    """
    device = next(model.parameters()).device
    found = [model.text(table.take(part, template).to(device)) for part in _blocks(places)]
    return torch.cat(found) if found else torch.empty(0, model.loss.features, device=device)


@torch.no_grad()
def embed_pairs(
    model: TwoTowers,
    split: PairSplit,
    table: TextTable,
    rows: np.ndarray | None = None,
    *,
    workers: int = 0,
    broken: BrokenLimit | None = None,
) -> Embedded:
    """Embeddings of pairs, in blocks, without augmentation.

    Args:
        model: in evaluation mode.
        split: of the pairs.
        table: of its texts.
        rows: [n] which pairs; None for all.
        workers: processes that decode pictures.
        broken: counts pictures that cannot be read; None for none allowed beyond its usual share.
    """
    rows = np.arange(len(split)) if rows is None else np.asarray(rows, dtype=np.int64)
    broken = broken or BrokenLimit()
    device = next(model.parameters()).device
    parts = list(_blocks(rows))
    read = reader(split.images, workers)
    fetched = (split.images.fetch(part) for part in parts) if read is None else read(parts)
    images, kept = [], []
    for found in fetched:
        broken.add(found)
        if len(found.rows):
            images.append(model.image(found.inputs.to(device)))
            kept.append(found.rows)
    if not images:
        raise ValueError(f"none of {len(rows):,} pictures could be read")
    numbers = np.concatenate(kept)
    texts = embed_texts(model, table, split.sources[numbers])
    return Embedded(torch.cat(images), texts, numbers)


def choose_templates(seeds: Sequence[int] | np.ndarray, templates: int) -> np.ndarray:
    """Which template each text of a batch is put into, [b], by its seed.

    Args:
        seeds: [b]
        templates: T
    """
    if templates == 1:
        return np.zeros(len(seeds), dtype=np.int64)
    # The low bits move the picture: these are others.
    return (np.asarray(seeds, dtype=np.int64) >> 20) % templates


def _blocks(places: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(places), BLOCK):
        yield places[start : start + BLOCK]
