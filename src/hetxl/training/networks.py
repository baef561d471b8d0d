"""The networks that need nothing but torch: a multi-layer perceptron for features or tokens, and a small residual
network for pictures. They normalise without batch statistics, so that a batch may be cut into any parts; where pictures
are all alike, the last layer does not (`Cnn(centred=True)`)."""

import torch
from torch import Tensor, nn


class TokenWindow(nn.Module):
    """The embeddings of the tokens before the one to predict, side by side.

    Args:
        vocabulary: how many token ids there are.
        context: C
        embedding: E
    """

    def __init__(self, vocabulary: int, context: int, embedding: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, embedding)
        nn.init.normal_(self.table.weight, std=1.0 / embedding**0.5)
        self.out_features = context * embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, C] ids to [B, C·E]."""
        return self.table(tokens).flatten(1)


class Mlp(nn.Module):
    """Hidden layers with normalisation and GELU, then a projection to the features that a head reads.

    Args:
        in_features: of the input.
        width: of the hidden layers.
        depth: how many hidden layers; those after the first are residual.
        out_features: D
        dropout: after every hidden layer.
    """

    def __init__(self, in_features: int, width: int, depth: int, out_features: int, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Linear(in_features, width)
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width))
            for _ in range(depth - 1)
        )
        self.last = nn.Sequential(nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, out_features))
        self.norm = nn.LayerNorm(out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, in_features] to [B, D]."""
        found = self.first(inputs)
        for layer in self.hidden:
            found = found + layer(found)
        return self.norm(self.last(found))


class _Block(nn.Module):
    """Two 3 × 3 convolutions around a residual path, normalised by groups before each."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inside), nn.GroupNorm(8, outside)])
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
                nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            ]
        )
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, pictures: Tensor) -> Tensor:
        """[B, c, h, w] to [B, c′, h / stride, w / stride]."""
        found = pictures
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            found = convolution(torch.relu(norm(found)))
        return found + self.shortcut(pictures)


class Cnn(nn.Module):
    """A residual network of stages, each of twice the channels and half the size of the one before.

    Args:
        width: channels of the first stage, a multiple of 8.
        depth: blocks in each stage.
        out_features: D
        size: height of the pictures; large ones are halved twice before the first stage. Small ones are not halved
            there, so that 32 × 32 pixels are still 4 × 4 after the last stage.
        channels: 3, or 1 for grey pictures.
        places: the features are read from a grid of about this many places a side. 1 is the mean over all places, for
            things that may be anywhere; signs are told apart by where their strokes are.
        stages: how many; small pictures are halved before the first of three, so that they end as small as after four.
        centred: whether the features are normalised over the batch, and not each example by itself. For pictures that
            are nearly the same on the whole, so that at the start nearly all of their features is common to all: what a
            class learns from one of its examples then raises its logit for every other, and thousands of classes make
            no headway for hundreds of steps.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        out_features: int,
        size: int,
        channels: int = 3,
        places: int = 1,
        stages: int = 4,
        centred: bool = False,
    ):
        super().__init__()
        if width % 8:
            raise ValueError(f"width of the cnn backbone must be a multiple of 8, found {width}")
        large = size >= 96
        kernel, stride = (7, 2) if large else (3, 1) if stages == 4 else (5, 2)
        stem: list[nn.Module] = [nn.Conv2d(channels, width, kernel, stride, kernel // 2)]
        if large:
            stem.append(nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        inside = width
        for stage in range(stages):
            outside = width * 2**stage
            for number in range(depth):
                blocks.append(_Block(inside, outside, 2 if stage and not number else 1))
                inside = outside
        self.body = nn.Sequential(*stem, *blocks)
        side = size
        for _ in range((2 if large else stride - 1) + stages - 1):  # every halving rounds up
            side = (side + 1) // 2
        step = max(1, side // places)
        self.pool = nn.AvgPool2d(step)
        self.last = nn.Linear(inside * (side // step) ** 2, out_features)
        self.norm = nn.BatchNorm1d(out_features) if centred else nn.LayerNorm(out_features)

    def forward(self, pictures: Tensor) -> Tensor:
        """[B, channels, H, W] to [B, D]."""
        return self.norm(self.last(self.pool(torch.relu(self.body(pictures))).flatten(1)))
