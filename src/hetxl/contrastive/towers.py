"""Towers: from a picture, a text, or a vector that was computed already, to an embedding [B, D]."""

import torch
from torch import Tensor, nn

from hetxl.contrastive.ngrams import Bags
from hetxl.data.dataset import InputSpec
from hetxl.functional._checks import integer_at_least
from hetxl.training.networks import Cnn, Mlp


class NgramTower(nn.Module):
    """Texts as the mean of the vectors of their n-grams, then a perceptron.

    Args:
        features: D
        buckets: of the hashed n-grams.
        embedding: size of an n-gram's vector.
        width: of the hidden layers.
        depth: how many hidden layers.
        dropout: after every hidden layer.
    """

    def __init__(
        self, features: int, buckets: int = 32768, embedding: int = 128, width: int = 256, depth: int = 1,
        dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.buckets = integer_at_least("buckets", buckets, 1)
        self.table = nn.EmbeddingBag(buckets, embedding, mode="mean")
        nn.init.normal_(self.table.weight)
        # The mean of n vectors has a variance of 1 / n: brought back to 1, whatever the length of the text.
        self.norm = nn.LayerNorm(embedding)
        self.body = Mlp(embedding, width, depth, features, dropout)

    def forward(self, bags: Bags) -> Tensor:
        """Bags of n-grams to [B, D]."""
        return self.body(self.norm(self.table(bags.ids, bags.offsets)))


class LockedTower(nn.Module):
    """Behind a tower that is locked, whose vectors are the input: one layer that is trained (LiT), or none.

    Args:
        in_features: of the vectors.
        features: D
        project: whether there is the layer; without it the vectors are the embeddings, and D must be theirs.
    """

    def __init__(self, in_features: int, features: int, project: bool = True):
        super().__init__()
        if not project and in_features != features:
            raise ValueError(
                f"features must be {in_features}, the size of the locked tower's vectors, where neither side has a "
                f"layer of its own; found {features}"
            )
        self.layer = nn.Linear(in_features, features) if project else nn.Identity()

    def forward(self, vectors: Tensor) -> Tensor:
        """[B, in_features] to [B, D]."""
        return self.layer(vectors)


def image_tower(spec: InputSpec, features: int, width: int, depth: int, project: bool = True) -> nn.Module:
    """A tower for pictures or for their vectors.

    Args:
        spec: what it gets.
        features: D
        width: channels of the first stage of the network for pictures, a multiple of 8.
        depth: blocks in each stage.
        project: for vectors, whether a layer is trained behind them.
    """
    if spec.kind == "features":
        return LockedTower(spec.shape[0], features, project)
    if spec.kind != "image":
        raise ValueError(f"an image tower takes images or features, found {spec.kind}")
    channels, size = spec.shape[0], spec.shape[-1]
    # Small drawings: told apart by where their strokes are, and alike on the whole.
    drawings = {"places": 4, "stages": 3, "centred": True} if channels == 1 else {}
    return Cnn(width, depth, features, size, channels, **drawings)


def text_tower(
    spec: InputSpec | None,
    features: int,
    *,
    buckets: int,
    embedding: int,
    width: int,
    depth: int,
    dropout: float,
    project: bool = True,
) -> nn.Module:
    """A tower for texts or for their vectors.

    Args:
        spec: of vectors; None for texts.
        features: D
        buckets: as in `NgramTower`.
        embedding: as in `NgramTower`.
        width: as in `NgramTower`.
        depth: as in `NgramTower`.
        dropout: as in `NgramTower`.
        project: for vectors, whether a layer is trained behind them.
    """
    if spec is not None:
        return LockedTower(spec.shape[0], features, project)
    return NgramTower(features, buckets, embedding, width, depth, dropout)


def unit(embeddings: Tensor) -> Tensor:
    """Embeddings at length 1, [..., D]."""
    return torch.nn.functional.normalize(embeddings, dim=-1)
