"""Two towers with a contrastive loss, as one module: what is trained, saved and evaluated.

An image tower takes images or their vectors. A text tower takes vectors, the tokens of a model, or texts as bags of
hashed character n-grams: nothing to learn beforehand, and no word is unknown. Every text is prepared once. Towers that
were trained elsewhere are those of `tower_networks`, free or locked.
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


class TokenTable:
    """The tokens of many texts, [m, L] on demand: of a text tower from another library."""

    def __init__(self, texts: Sequence[str], tokenize: Callable[[Sequence[str]], Tensor]):
        parts = [tokenize(texts[start : start + BLOCK]) for start in range(0, len(texts), BLOCK)]
        # Blocks differ in the length of their longest text.
        rows = [row[row != PADDING].numpy() for part in parts for row in part]
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        self._rows = Labels(np.concatenate(rows).astype(np.int32) if rows else np.empty(0, dtype=np.int32), starts)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, numbers: np.ndarray) -> Tensor:
        """Return the tokens of the texts with these numbers [b], [b, L] int64 with L that of the longest."""
        chosen = self._rows.subset(np.asarray(numbers, dtype=np.int64))
        assert chosen.offsets is not None
        lengths = np.diff(chosen.offsets)
        ids = torch.full((len(lengths), int(lengths.max(initial=0))), PADDING)
        ids[torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None])] = torch.from_numpy(
            chosen.ids.astype(np.int64)
        )
        return ids


class TextTable:
    """The input of `count` = m texts, each in T templates: m · T texts as a text tower reads them, the first template
    of all texts first."""

    def __init__(self, read: NgramTable | TokenTable | Texts, count: int):
        if count and len(read) % count:
            raise ValueError(f"read must have a multiple of {count} texts, found {len(read)}")
        self.read, self.count = read, count
        self.templates = max(1, len(read) // count) if count else 1

    def take(self, numbers: np.ndarray, template: np.ndarray | int = 0) -> Bags | Tensor:
        """Return the texts with these numbers [b] as the tower takes them, in one template or each in its own [b]."""
        at = np.asarray(numbers, dtype=np.int64) + self.count * np.asarray(template, dtype=np.int64)
        if isinstance(self.read, NgramTable | TokenTable):
            return self.read.take(at)
        return torch.from_numpy(self.read.take(at))


class Encoder(Protocol):
    """What gives the vectors of texts: an encoder of another package, or a text tower that is locked."""

    size: int  # D′ of the vectors

    def encode(self, texts: Sequence[str], cache: Path | None = None) -> np.ndarray:
        """Return vectors of the texts, [n, D′] float32."""
        ...


class TextReader:
    """Prepare texts for a text tower: n-grams in buckets, tokens of at most a length, or vectors by an encoder.

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
        # Tables are kept with their texts, for all runs of a process; those of a run's own network are kept here.
        self.key: tuple[Any, ...] = (tower, buckets, length)
        self.own: dict[tuple[int, tuple[str, ...]], TextTable] = {}

    @classmethod
    def of(cls, options: TowerOptions) -> "TextReader":
        """Return the reader of a configuration's text tower."""
        return cls(options.text, options.buckets, length=options.text_length)

    def spec(self, pairs: Pairs) -> InputSpec | None:
        """Return the input of the text tower: vectors, or None for texts."""
        if pairs.text is not None:
            return pairs.text
        if self.encoder is not None:
            return InputSpec("features", (self.encoder.size,))
        return None if self.tokenize is None else self.tokenize.input

    def table(self, texts: Texts, templates: Sequence[str] = ("{}",)) -> TextTable:
        """Return the table of some texts in templates, each with {} where the text goes; cached for the next call.

        Vectors that come with the data go before captions, and into no template.
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


class Tower(nn.Module):
    """A network with D′ features, nn.Identity for vectors, and a trained layer behind it, or none."""

    def __init__(self, body: nn.Module, in_features: int, features: int, project: bool = True):
        super().__init__()
        if not project and in_features != features:
            raise ValueError(f"a tower without a projection has {in_features} features; set features = {in_features}")
        self.body = body
        self.layer = nn.Linear(in_features, features) if project else nn.Identity()

    def forward(self, inputs: Any) -> Tensor:
        """Inputs of the network to [B, D]."""
        return self.layer(self.body(inputs))

    def behind(self) -> "Tower":
        """Return the same layer as a tower of its own, for vectors of the network."""
        tower = Tower(nn.Identity(), 1, 1, project=False)
        tower.layer = self.layer
        return tower


class Slopes(NamedTuple):
    """The gradient of a loss: with respect to the embeddings of some pairs, and to the loss's own parameters."""

    images: Tensor  # [b, D]
    texts: Tensor  # [b, D]
    own: dict[str, Tensor]  # by the names of the parameters; empty where another part of the batch has them


class TwoTowers(nn.Module):
    """loss(image tower(images), text tower(texts)); the towers give embeddings [B, D]."""

    def __init__(self, image: nn.Module, text: nn.Module, loss: ContrastiveLoss):
        super().__init__()
        self.image, self.text, self.loss = image, text, loss

    def units(self) -> tuple[nn.Module, ...]:
        """Return the parts whose weights FSDP gathers while they are called; the loss has all of its own in a call."""
        return self.image, self.text

    def forward(
        self, images: Tensor, texts: Bags | Tensor, slopes: Slopes | None = None, *, embed: bool = False, **options: Any
    ) -> Any:
        """Return the loss of a batch of pairs; options as of the loss.

        With the gradient of the loss of a whole batch, of which these are a part: a number that has that gradient.
        `embed` returns the embeddings instead, [b, D] of images and of texts.
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
        """Where the weights are."""
        return next(self.parameters()).device


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


def transform_of(options: ContrastiveConfig) -> ImageTransform:
    """Return what the images of a configuration go through."""
    own = image_transform(options.image, options.image_size) if is_network(options.image) else None
    return own or ImageTransform(options.image_size or 64)


def build_towers(config: ContrastiveConfig, specs: Specs, published: bool = True, **options: Any) -> TwoTowers:
    """Return the model with the initial weights of the configuration's seed.

    The towers are the same for every head of a seed: each part is drawn from a seed of its own. Options are of the
    loss, beyond those of the configuration. For `published` see `tower_network`.
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
        raise ValueError(f"{side}_lock = {lock} needs a tower that was trained before, found {side} = {name}")


def text_tower(options: TowerOptions, specs: Specs, published: bool = True) -> nn.Module:
    """Return a tower for texts or for their vectors."""
    if specs.text is None:
        _check_free("text", options)
        return NgramTower(options)
    project = options.projections != "image"
    if specs.text.kind == "text":
        network = tower_network(options, "text", specs.text, published)
        return Tower(network, network.out_features, options.features, project)
    # As in LiT, the layer is behind the images where both sides are locked and of the same size.
    size = specs.text.shape[0]
    bare = specs.image.kind == "features" and size == options.features and options.projections == "both"
    return Tower(nn.Identity(), size, options.features, project and not bare)


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
