"""Small models that tests look for a classifier in."""

import itertools

from torch import nn


class Branches(nn.Module):
    """Modules under names, in the order in which they are given."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, with a ReLU between two."""
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
