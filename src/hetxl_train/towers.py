"""Two towers with a contrastive loss, as one module: what is trained, saved and evaluated.

An image tower takes images or their vectors. A text tower takes vectors, or texts as bags of hashed character n-grams:
nothing to learn beforehand, and no word is unknown. Every text is prepared once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._seeds import derive_seed
from hetxl.contrastive.loss import ContrastiveLoss
from hetxl_train import plugins
from hetxl_train.backbones import Mlp, image_network
from hetxl_train.config import ContrastiveConfig, TowerOptions
from hetxl_train.data.dataset import InputSpec, UnreadableExamples
from hetxl_train.data.labels import Labels
from hetxl_train.data.pairs import Pairs, PairSplit, Texts
from hetxl_train.distributed import World
from hetxl_train.loaders import blocks, reader
from hetxl_train.parallel import autocast

NGRAMS = (2, 3, 4)
"""Lengths of the n-grams; a whole word counts too."""
LONGEST = 2048
"""Characters of a text that are looked at."""
LOSS_OPTIONS = (
    "link", "covariance", "rank", "residual", "noise_init", "noise_group", "normalize", "scale_init",
    "bias_init", "max_scale",
)  # fmt: skip
BLOCK = 512
"""Images or texts that go through a tower at a time, outside of training."""


# ---- texts


class Bags(NamedTuple):
    """Bags of hashed n-grams as nn.EmbeddingBag takes them."""

    ids: Tensor  # [m] int64, the n-grams of all texts in turn
    offsets: Tensor  # [B] int64, where each text's begin

    def to(self, device: torch.device) -> "Bags":
        """Return the same on a device."""
        return Bags(self.ids.to(device), self.offsets.to(device))


def ngrams(text: str, buckets: int, sizes: Sequence[int] = NGRAMS) -> list[int]:
    """Return the buckets of a text's n-grams, taken within words whose ends are marked, and of its words.

        "ab c" with sizes (2,): <a ab b> <ab> <c c> <c>, and their hashes

    Case and extra spaces do not matter. Ids are from 0 to buckets − 1; an empty text has the bucket of the empty word.
    """
    pieces = []
    for word in text[:LONGEST].lower().split() or [""]:
        marked = f"<{word}>"
        pieces.append(marked)
        # A piece as long as the word is the word.
        pieces += [marked[at : at + n] for n in sizes if n < len(marked) for at in range(len(marked) - n + 1)]
    return [crc32(piece.encode("utf-8", "surrogatepass")) % buckets for piece in pieces]


class NgramTable:
    """The n-grams of many texts, counted once."""

    def __init__(self, texts: Sequence[str], buckets: int):
        parts = [np.array(ngrams(text, buckets), dtype=np.int32) for text in texts]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self.ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        self._rows = Labels(self.ids, starts)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, numbers: np.ndarray) -> Bags:
        """Return the bags of the texts with these numbers, [b]."""
        chosen = self._rows.subset(np.asarray(numbers, dtype=np.int64))
        assert chosen.offsets is not None
        return Bags(torch.from_numpy(chosen.ids), torch.from_numpy(chosen.offsets[:-1]))


class TextTable:
    """The input of `count` = m texts, each in T templates: m · T texts as a text tower reads them, the first template
    of all texts first."""

    def __init__(self, read: NgramTable | Texts, count: int):
        if count and len(read) % count:
            raise ValueError(f"read must have a multiple of {count} texts, found {len(read)}")
        self.read, self.count = read, count
        self.templates = max(1, len(read) // count) if count else 1

    def take(self, numbers: np.ndarray, template: np.ndarray | int = 0) -> Bags | Tensor:
        """Return the texts with these numbers [b] as the tower takes them, in one template or each in its own [b]."""
        at = np.asarray(numbers, dtype=np.int64) + self.count * np.asarray(template, dtype=np.int64)
        if isinstance(self.read, NgramTable):
            return self.read.take(at)
        return torch.from_numpy(self.read.take(at))


class TextReader:
    """Prepare texts for a text tower: "ngrams" in buckets, or the name of an encoder that another package adds.

    Encoded texts are cached in a directory; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """

    def __init__(self, tower: str = "ngrams", buckets: int = 16384, cache: Path | None = None):
        self.tower, self.buckets, self.cache = tower, buckets, cache
        self._tables: dict[tuple[int, tuple[str, ...]], tuple[Texts, TextTable]] = {}

    def spec(self, pairs: Pairs) -> InputSpec | None:
        """Return the input of the text tower: vectors, or None for texts."""
        if pairs.text is not None:
            return pairs.text
        if self.tower == "ngrams":
            return None
        return InputSpec("features", (plugins.load("text_encoders", self.tower).size,))

    def table(self, texts: Texts, templates: Sequence[str] = ("{}",)) -> TextTable:
        """Return the table of some texts in templates, each with {} where the text goes; cached for the next call.

        Vectors that come with the data go before captions, and into no template.
        """
        key = (id(texts), tuple(templates))
        if key not in self._tables:
            self._tables[key] = (texts, self.once(texts, templates))  # with the texts, whose id stays theirs
        return self._tables[key][1]

    def once(self, texts: Texts, templates: Sequence[str] = ("{}",)) -> TextTable:
        """Return the same without caching."""
        if texts.vectors is not None:
            return TextTable(texts, len(texts))
        assert texts.captions is not None
        filled = [template.replace("{}", caption) for template in templates for caption in texts.captions]
        if self.tower != "ngrams":
            encoder = plugins.load("text_encoders", self.tower)
            return TextTable(Texts(vectors=encoder.encode(filled, self.cache)), len(texts))
        return TextTable(NgramTable(filled, self.buckets), len(texts))


# ---- towers


class NgramTower(nn.Module):
    """Texts as the mean of the vectors of their n-grams, then a perceptron."""

    def __init__(self, options: TowerOptions):
        super().__init__()
        embedding = options.embedding
        self.table = nn.EmbeddingBag(options.buckets, embedding, mode="mean")
        nn.init.normal_(self.table.weight)
        # The mean of n vectors has a variance of 1 / n: brought back to 1, whatever the length of the text.
        self.norm = nn.LayerNorm(embedding)
        self.body = Mlp(embedding, options.text_width, options.text_depth, options.features, options.dropout)

    def forward(self, bags: Bags) -> Tensor:
        """Bags of n-grams to [B, D]."""
        return self.body(self.norm(self.table(bags.ids, bags.offsets)))


class LockedTower(nn.Module):
    """One trained layer behind the vectors of a locked tower (LiT), or none: then the vectors are the embeddings."""

    def __init__(self, in_features: int, features: int, project: bool = True):
        super().__init__()
        self.layer = nn.Linear(in_features, features) if project else nn.Identity()

    def forward(self, vectors: Tensor) -> Tensor:
        """[B, in_features] to [B, D]."""
        return self.layer(vectors)


class TwoTowers(nn.Module):
    """loss(image tower(images), text tower(texts)); the towers give embeddings [B, D]."""

    def __init__(self, image: nn.Module, text: nn.Module, loss: ContrastiveLoss):
        super().__init__()
        self.image, self.text, self.loss = image, text, loss

    def forward(self, images: Tensor, texts: Bags | Tensor, **options: Any) -> Tensor:
        """Return the loss of a batch of pairs; options as of the loss."""
        return self.loss(self.image(images), self.text(texts), **options)


class Specs(NamedTuple):
    """Inputs of the towers."""

    image: InputSpec  # an image, or features where the tower is locked
    text: InputSpec | None  # features where the tower is locked; None for texts


class Embedded(NamedTuple):
    """Embeddings of pairs, before they are normalised."""

    split: PairSplit
    images: Tensor  # [n, D]
    texts: Tensor  # [n, D]
    rows: np.ndarray  # [n] int64, which pairs of the split they are, without images that cannot be read

    @property
    def groups(self) -> np.ndarray:
        """[n], the same for pairs with equal texts."""
        return self.split.groups[self.rows]

    @property
    def swapped(self) -> np.ndarray | None:
        """[n] bool, which pairs were swapped; None for a split without swaps."""
        return None if self.split.swaps is None else self.split.swaps.mask(len(self.split))[self.rows]


def build_towers(config: ContrastiveConfig, specs: Specs, **options: Any) -> TwoTowers:
    """Return the model with the initial weights of the configuration's seed.

    The towers are the same for every head of a seed: each part is drawn from a seed of its own. Options are of the
    loss, beyond those of the configuration.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, 20))
        image = image_tower(config, specs.image)
        torch.manual_seed(derive_seed(config.seed, 21))
        text = text_tower(config, specs)
        torch.manual_seed(derive_seed(config.seed, 22))
        options |= {name: getattr(config, name) for name in LOSS_OPTIONS} | {"num_samples": config.samples}
        loss = ContrastiveLoss(config.features, noise=config.noise_side, **options)  # pyright: ignore[reportArgumentType]
    return TwoTowers(image, text, loss)


def image_tower(options: TowerOptions, spec: InputSpec) -> nn.Module:
    """Return a tower for images or for their vectors."""
    if spec.kind == "features":
        return LockedTower(spec.shape[0], options.features)
    return image_network(options.width, options.depth, options.features, spec)


def text_tower(options: TowerOptions, specs: Specs) -> nn.Module:
    """Return a tower for texts or for their vectors."""
    if specs.text is None:
        return NgramTower(options)
    # As in LiT, the layer is behind the images where both sides are locked and of the same size.
    size = specs.text.shape[0]
    return LockedTower(size, options.features, specs.image.kind != "features" or size != options.features)


@torch.no_grad()
def embed_pairs(
    model: TwoTowers, split: PairSplit, table: TextTable, rows: np.ndarray | None = None, *, workers: int = 0,
    precision: str = "float32", world: World | None = None,
) -> Embedded:  # fmt: skip
    """Return embeddings of pairs by a model in evaluation mode, computed in blocks, without augmentation.

    The table is that of the split's texts; rows [n] say which pairs, None for all; matrix products are in a precision.
    The processes of `world`, which all
    call this, divide the blocks; the main process has the outcome, the others an empty one.
    """
    rows = np.arange(len(split)) if rows is None else np.asarray(rows, dtype=np.int64)
    device, dtype = (parameter := next(model.parameters())).device, parameter.dtype
    world = world or World(device)

    def work() -> list[tuple[Tensor, Tensor, np.ndarray]]:
        unreadable, parts = UnreadableExamples(), []
        for block in reader(split.images, workers)(world.share(blocks(rows, BLOCK))):
            unreadable.add(block)
            if len(block.rows):
                with autocast(device, precision):
                    texts = model.text(table.take(split.sources[block.rows]).to(device))
                    images = model.image(block.inputs.to(device))
                parts.append((images.to(dtype).cpu(), texts.to(dtype).cpu(), block.rows))
        return parts

    parts = [part for share in world.gather(work) for part in share]
    world.on_main(lambda: _check_read(parts, len(rows)))
    nothing = torch.empty(0, 0), torch.empty(0, 0), np.empty(0, dtype=np.int64)
    images, texts, numbers = zip(*(parts if world.is_main else [nothing]), strict=True)
    return Embedded(split, torch.cat(images).to(device), torch.cat(texts).to(device), np.concatenate(numbers))


def _check_read(parts: Sequence[Any], rows: int) -> None:
    """Raise if no image could be read."""
    if not parts:
        raise ValueError(f"none of {rows:,} images could be read")


def choose_templates(seeds: Sequence[int] | np.ndarray, templates: int) -> np.ndarray:
    """Return which of T templates each text of a batch is put into, [b], by its seed [b]."""
    # The low bits move the image: these are others.
    return (np.asarray(seeds, dtype=np.int64) >> 20) % templates
