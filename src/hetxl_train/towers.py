"""Two towers with a contrastive loss as one module, which is trained, saved and evaluated.

An image tower takes images or their vectors. A text tower takes vectors, the tokens of a model, or texts as bags of
hashed character n-grams, which need no vocabulary. Every text is prepared once. Pre-trained towers, free or locked, are
in `tower_networks`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from hetxl._seeds import derive_seed
from hetxl.contrastive.loss import ContrastiveLoss
from hetxl.functional._torch import touched
from hetxl_train import plugins
from hetxl_train.backbones import Mlp, image_network
from hetxl_train.config import ContrastiveConfig, TowerOptions
from hetxl_train.data.dataset import InputSpec, UnreadableExamples
from hetxl_train.data.labels import Labels
from hetxl_train.data.pairs import Pairs, PairSplit, Texts
from hetxl_train.data.text import PADDING
from hetxl_train.data.transforms import ImageTransform
from hetxl_train.distributed import World
from hetxl_train.loaders import blocks, reader
from hetxl_train.parallel import autocast
from hetxl_train.tower_networks import image_transform, is_network, tokenizer_for, tower_network

NGRAMS = (2, 3, 4)
"""Lengths of the n-grams, in addition to whole words."""
LONGEST = 2048
"""Maximum number of characters of a text that are used."""
LOSS_OPTIONS = (
    "link", "covariance", "rank", "residual", "noise_init", "noise_group", "normalize", "scale_init",
    "bias_init", "max_scale",
)  # fmt: skip
BLOCK = 512
"""Batch size of the towers outside of training."""


# ---- texts


class Bags(NamedTuple):
    """Bags of hashed n-grams as nn.EmbeddingBag takes them."""

    ids: Tensor  # [m] int64, the n-grams of all texts, concatenated
    offsets: Tensor  # [B] int64, start of each text

    def to(self, device: torch.device) -> "Bags":
        """Move to a device."""
        return Bags(self.ids.to(device), self.offsets.to(device))


def ngrams(text: str, buckets: int, sizes: Sequence[int] = NGRAMS) -> list[int]:
    """Return the buckets of a text's n-grams, within words with marked ends, and of its words.

        "ab c" with sizes (2,): <a ab b> <ab> <c c> <c>, and their hashes

    Case and extra spaces are ignored. Ids are from 0 to buckets − 1; an empty text has the bucket of the empty word.
    """
    pieces = []
    for word in text[:LONGEST].lower().split() or [""]:
        marked = f"<{word}>"
        pieces.append(marked)
        # An n-gram as long as the word is the word.
        pieces += [marked[at : at + n] for n in sizes if n < len(marked) for at in range(len(marked) - n + 1)]
    return [crc32(piece.encode("utf-8", "surrogatepass")) % buckets for piece in pieces]


class NgramTable:
    """The n-grams of many texts, computed once."""

    def __init__(self, texts: Sequence[str], buckets: int):
        parts = [np.array(ngrams(text, buckets), dtype=np.int32) for text in texts]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self.ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        self._rows = Labels(self.ids, starts)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, numbers: np.ndarray) -> Bags:
        """Return the bags of the texts with these indices, [b]."""
        chosen = self._rows.subset(np.asarray(numbers, dtype=np.int64))
        assert chosen.offsets is not None
        return Bags(torch.from_numpy(chosen.ids), torch.from_numpy(chosen.offsets[:-1]))


class TokenTable:
    """The tokens of many texts, computed on demand, for text towers of other libraries."""

    def __init__(self, texts: Sequence[str], tokenize: Callable[[Sequence[str]], Tensor]):
        parts = [tokenize(texts[start : start + BLOCK]) for start in range(0, len(texts), BLOCK)]
        # The longest text differs between blocks.
        rows = [row[row != PADDING].numpy() for part in parts for row in part]
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        self._rows = Labels(np.concatenate(rows).astype(np.int32) if rows else np.empty(0, dtype=np.int32), starts)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, numbers: np.ndarray) -> Tensor:
        """Return the tokens of the texts with these indices [b], [b, L] int64 with the length L of the longest."""
        chosen = self._rows.subset(np.asarray(numbers, dtype=np.int64))
        assert chosen.offsets is not None
        lengths = np.diff(chosen.offsets)
        ids = torch.full((len(lengths), int(lengths.max(initial=0))), PADDING)
        ids[torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None])] = torch.from_numpy(
            chosen.ids.astype(np.int64)
        )
        return ids


class TextTable:
    """The inputs of `count` = m texts in T templates: m · T texts for a text tower, sorted by template."""

    def __init__(self, read: NgramTable | TokenTable | Texts, count: int):
        if count and len(read) % count:
            raise ValueError(f"read must have a multiple of {count} texts, found {len(read)}")
        self.read, self.count = read, count
        self.templates = max(1, len(read) // count) if count else 1

    def take(self, numbers: np.ndarray, template: np.ndarray | int = 0) -> Bags | Tensor:
        """Return the inputs of the texts with these indices [b], in one template or a template per text [b]."""
        at = np.asarray(numbers, dtype=np.int64) + self.count * np.asarray(template, dtype=np.int64)
        if isinstance(self.read, NgramTable | TokenTable):
            return self.read.take(at)
        return torch.from_numpy(self.read.take(at))


class Encoder(Protocol):
    """An encoder of texts: from another package, or a locked text tower."""

    size: int  # D′ of the vectors

    def encode(self, texts: Sequence[str], cache: Path | None = None) -> np.ndarray:
        """Return vectors of the texts, [n, D′] float32."""
        ...


class TextReader:
    """Prepare texts for a text tower: n-grams in buckets, tokens up to a maximum length, or vectors of an encoder.

    Encoded texts are cached in a directory; None for $HETXL_CACHE, or ~/.cache/hetxl.
    """

    def __init__(
        self, tower: str = "ngrams", buckets: int = 16384, cache: Path | None = None, length: int = 64,
        tokenize: Any = None,
    ):  # fmt: skip
        self.tower, self.buckets, self.cache = tower, buckets, cache
        self.tokenize: Any = tokenizer_for(tower, length) if tokenize is None and is_network(tower) else tokenize
        self.encoder: Encoder | None = None
        if self.tokenize is None and tower != "ngrams":
            self.encoder = plugins.load("text_encoders", tower)
        # Tables are cached with their texts, for all runs of a process; those of a run's own network are cached here.
        self.key: tuple[Any, ...] = (tower, buckets, length)
        self.own: dict[tuple[int, tuple[str, ...]], TextTable] = {}

    @classmethod
    def of(cls, options: TowerOptions) -> "TextReader":
        """Return the reader for the configured text tower."""
        return cls(options.text, options.buckets, length=options.text_length)

    def spec(self, pairs: Pairs) -> InputSpec | None:
        """Return the input of the text tower: vectors, or None for texts."""
        if pairs.text is not None:
            return pairs.text
        if self.encoder is not None:
            return InputSpec("features", (self.encoder.size,))
        return None if self.tokenize is None else self.tokenize.input

    def table(self, texts: Texts, templates: Sequence[str] = ("{}",)) -> TextTable:
        """Return the table of texts in templates with {} in place of the text; cached for the next call.

        Vectors in the data have priority over captions, and use no template.
        """
        prompts = tuple(templates)
        if (id(texts), prompts) in self.own:
            return self.own[id(texts), prompts]
        key = (*self.key, prompts)
        if key not in texts.tables:
            texts.tables[key] = self.once(texts, templates)
        return texts.tables[key]

    def once(self, texts: Texts, templates: Sequence[str] = ("{}",)) -> TextTable:
        """Return the same without caching."""
        if texts.vectors is not None:
            return TextTable(texts, len(texts))
        assert texts.captions is not None
        filled = [template.replace("{}", caption) for template in templates for caption in texts.captions]
        if self.encoder is not None:
            return TextTable(Texts(vectors=self.encoder.encode(filled, self.cache)), len(texts))
        if self.tokenize is not None:
            return TextTable(TokenTable(filled, self.tokenize), len(texts))
        return TextTable(NgramTable(filled, self.buckets), len(texts))


# ---- towers


class NgramTower(nn.Module):
    """The mean of the vectors of a text's n-grams, then a perceptron."""

    def __init__(self, options: TowerOptions):
        super().__init__()
        embedding = options.embedding
        self.table = nn.EmbeddingBag(options.buckets, embedding, mode="mean")
        nn.init.normal_(self.table.weight)
        # The mean of n vectors has variance 1 / n; scale it to 1, independently of the length of the text.
        self.norm = nn.LayerNorm(embedding)
        self.body = Mlp(embedding, options.text_width, options.text_depth, options.features, options.dropout)

    def forward(self, bags: Bags) -> Tensor:
        """Map bags of n-grams to [B, D]."""
        return self.body(self.norm(self.table(bags.ids, bags.offsets)))


class Tower(nn.Module):
    """A network with D′ features (nn.Identity for vectors), followed by a trained layer or none."""

    def __init__(self, body: nn.Module, in_features: int, features: int, project: bool = True):
        super().__init__()
        if not project and in_features != features:
            raise ValueError(f"a tower without a projection has {in_features} features; set features = {in_features}")
        self.body = body
        self.layer = nn.Linear(in_features, features) if project else nn.Identity()

    def forward(self, inputs: Any) -> Tensor:
        """Map inputs of the network to [B, D]."""
        return self.layer(self.body(inputs))

    def behind(self) -> "Tower":
        """Return the trained layer as a separate tower for vectors of the network."""
        tower = Tower(nn.Identity(), 1, 1, project=False)
        tower.layer = self.layer
        return tower


class Slopes(NamedTuple):
    """The gradient of a loss with respect to the embeddings of pairs and to the loss's parameters."""

    images: Tensor  # [b, D]
    texts: Tensor  # [b, D]
    own: dict[str, Tensor]  # by parameter name; empty if another part of the batch has them


class TwoTowers(nn.Module):
    """loss(image tower(images), text tower(texts)) with embeddings [B, D]."""

    def __init__(self, image: nn.Module, text: nn.Module, loss: ContrastiveLoss):
        super().__init__()
        self.image, self.text, self.loss = image, text, loss

    def units(self) -> tuple[nn.Module, ...]:
        """Return the modules whose weights FSDP gathers while they are called; the loss always has all its weights."""
        return self.image, self.text

    def forward(
        self, images: Tensor, texts: Bags | Tensor, slopes: Slopes | None = None, *, embed: bool = False, **options: Any
    ) -> Any:
        """Return the loss of a batch of pairs; options are those of the loss.

        With the gradient of a whole batch's loss, of which these pairs are a part, return a number with that gradient.
        `embed` returns the embeddings of images and of texts instead, [b, D] each.
        """
        image, text = self.image(images), self.text(texts)
        if embed:
            return image, text
        if slopes is None:
            return self.loss(image, text, **options)
        value = (image * slopes.images).sum() + (text * slopes.texts).sum()
        own = dict(self.loss.named_parameters())
        value = value + sum((own[name] * slope).sum() for name, slope in slopes.own.items())
        return touched(value, *own.values())

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device


class Specs(NamedTuple):
    """Inputs of the towers."""

    image: InputSpec  # an image, or features of a locked tower
    text: InputSpec | None  # features of a locked tower; None for texts


class Embedded(NamedTuple):
    """Embeddings of pairs before normalisation."""

    split: PairSplit
    images: Tensor  # [n, D]
    texts: Tensor  # [n, D]
    rows: np.ndarray  # [n] int64, indices of the pairs in the split, without unreadable images

    @property
    def groups(self) -> np.ndarray:
        """Return group ids [n], equal for pairs with equal texts."""
        return self.split.groups[self.rows]

    @property
    def swapped(self) -> np.ndarray | None:
        """Return a mask [n] of swapped pairs; None for a split without swaps."""
        return None if self.split.swaps is None else self.split.swaps.mask(len(self.split))[self.rows]


def transform_of(options: ContrastiveConfig) -> ImageTransform:
    """Return the configured transform of images."""
    own = image_transform(options.image, options.image_size) if is_network(options.image) else None
    return own or ImageTransform(options.image_size or 64)


def build_towers(config: ContrastiveConfig, specs: Specs, published: bool = True, **options: Any) -> TwoTowers:
    """Create the model with the initial weights of the configuration's seed.

    Each part has a separate seed, so the towers are equal for all heads of a seed. `options` are further options of the
    loss. For `published` see `tower_network`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, 20))
        image = image_tower(config, specs.image, published)
        torch.manual_seed(derive_seed(config.seed, 21))
        text = text_tower(config, specs, published)
        torch.manual_seed(derive_seed(config.seed, 22))
        options |= {name: getattr(config, name) for name in LOSS_OPTIONS} | {"num_samples": config.samples}
        loss = ContrastiveLoss(config.features, noise=config.noise_side, **options)  # pyright: ignore[reportArgumentType]
    return TwoTowers(image, text, loss)


def image_tower(options: TowerOptions, spec: InputSpec, published: bool = True) -> nn.Module:
    """Return a tower for images or for their vectors."""
    project = options.projections != "text"
    if spec.kind == "features":
        return Tower(nn.Identity(), spec.shape[0], options.features, project)
    if not is_network(options.image):
        _check_free("image", options)
        return image_network(options.width, options.depth, options.features, spec)
    network = tower_network(options, "image", spec, published)
    return Tower(network, network.out_features, options.features, project)


def _check_free(side: str, options: TowerOptions) -> None:
    name, lock = getattr(options, side), getattr(options, f"{side}_lock")
    if lock != "free":
        raise ValueError(f"{side}_lock = {lock} needs a pre-trained tower, found {side} = {name}")


def text_tower(options: TowerOptions, specs: Specs, published: bool = True) -> nn.Module:
    """Return a tower for texts or for their vectors."""
    if specs.text is None:
        _check_free("text", options)
        return NgramTower(options)
    project = options.projections != "image"
    if specs.text.kind == "text":
        network = tower_network(options, "text", specs.text, published)
        return Tower(network, network.out_features, options.features, project)
    # As in LiT, only the image side has a projection if both sides are locked and have the same size.
    size = specs.text.shape[0]
    bare = specs.image.kind == "features" and size == options.features and options.projections == "both"
    return Tower(nn.Identity(), size, options.features, project and not bare)


@torch.no_grad()
def embed_pairs(
    model: TwoTowers, split: PairSplit, table: TextTable, rows: np.ndarray | None = None, *, workers: int = 0,
    precision: str = "float32", world: World | None = None,
) -> Embedded:  # fmt: skip
    """Return the embeddings of pairs by a model in evaluation mode, computed in blocks without augmentation.

    `table` has the split's texts, rows [n] select pairs (None for all), and `precision` is that of matrix products. The
    processes of `world` all call this and divide the blocks; only the main process gets the result, the others an empty
    one.
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
    """Return the index of the template of each text in a batch, [b], from its seed [b]."""
    # The low bits seed the image's augmentation, so use others.
    return (np.asarray(seeds, dtype=np.int64) >> 20) % templates
