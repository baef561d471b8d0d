"""Images: decoding, crops, and datasets of them in directories and manifests. Needs Pillow.

| data | contents |
| --- | --- |
| a directory | `ROOT/CLASS/….jpg`, at any depth below the class |
| a directory with splits | `ROOT/train/CLASS/…`, `ROOT/validation/…` (or `val`, `valid`, `dev`), `ROOT/test/…` |
| a manifest, `.csv`, `.jsonl` or `.parquet` | columns `path` (or `image`, `file`, `filename`), `label` (or `labels`, |
| | `class`, `target`) and optionally `split`; paths are relative to the manifest |

In CSV the labels of a row are separated by `|`. Hidden files, files that are not images, and links that lead back to a
parent directory are left out; the dataset's notes count them.
"""

import math
import os
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetxl_train.console import counted, progress_bar
from hetxl_train.data import manifests
from hetxl_train.data.build_dataset import SPLIT_NAMES, UNSPLIT, Plan, add_splits, assemble, split_name
from hetxl_train.data.dataset import Dataset, Fetched, InputSpec, Shown, Split, Unreadable
from hetxl_train.data.labels import LabelBuilder, Labels, RawLabels, printable, some

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
)
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
"""The formats that are decoded. Pillow knows more, some of which start other programs."""

PATH_COLUMNS = ("path", "image", "file", "filename", "file_name")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the colours of ImageNet, with which most backbones were trained."""

GREY_MEAN, GREY_STD = 0.5, 0.5  # of greyscale images: black becomes −1 and white 1
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # random crops: the share of the image's area, and width over height
SHORTER_SIDE = 256 / 224  # evaluation: the image's shorter side over the side of the centre crop
MAX_PIXELS = 178_956_970  # an image with more is taken for a decompression bomb: Pillow's own limit
CHECKED_PATHS = 100  # files of a manifest whose existence is checked when it is opened


class Paths:
    """Many paths as one block of bytes: worker processes share it, and it has no object for each path."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        lengths = np.fromiter((len(path) for path in encoded), dtype=np.int64, count=len(encoded))
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"path {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        return os.fsdecode(self._bytes[start : int(self._ends[index])].tobytes())


class ImageSplit(Split):
    """Images [3, size, size], or greyscale [1, size, size], decoded on demand.

    With seeds: a random crop, resized, and flipped horizontally half of the time. Without: the centre crop; of
    greyscale images, whose signs reach to the edges, the largest centred square. `mean` and `std` of red, green and
    blue normalise; greyscale uses `GREY_MEAN` and `GREY_STD`. `rows` are the paths of this split, None for all.
    """

    workers = True

    def __init__(
        self,
        paths: Sequence[str] | Paths,
        labels: Labels,
        rows: np.ndarray | None = None,
        *,
        size: int = 224,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        grey: bool = False,
    ) -> None:
        require_pillow()
        if size < 1:
            raise ValueError(f"image_size must be at least 1, found {size}")
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError(f"mean and std must be three numbers, std above 0; found {tuple(mean)} and {tuple(std)}")
        self.paths, self.labels, self.rows, self.size, self.grey = paths, labels, rows, size, grey
        if grey:
            mean, std = (GREY_MEAN,), (GREY_STD,)
        self.mean, self.std = np.array(mean, dtype=np.float32), np.array(std, dtype=np.float32)

    def path(self, row: int) -> str:
        """Return the path of a row's image."""
        return self.paths[int(row if self.rows is None else self.rows[row])]

    def show(self, row: int) -> Shown:
        """Return an example: the path of its image."""
        return Shown(image=self.path(row))

    def fetch(self, rows: np.ndarray, seeds: np.ndarray | None = None) -> Fetched:
        """Read rows [b], cropped at random by seeds [b]; those that cannot be read are left out and listed."""
        inputs, readable, unreadable = [], [], []
        for number, row in enumerate(np.asarray(rows).tolist()):
            path = self.path(row)
            try:
                image = read_image(path)
                inputs.append(self._crop(image, None if seeds is None else int(seeds[number])))
                readable.append(row)
            except (OSError, ValueError) as error:
                system = error.strerror if isinstance(error, OSError) else None
                reason = system.lower() if system else printable(str(error)) or type(error).__name__
                unreadable.append(Unreadable(path, reason))
        empty = np.empty((0, len(self.mean), self.size, self.size), dtype=np.float32)
        stacked = np.stack(inputs) if inputs else empty
        return Fetched(torch.from_numpy(stacked), np.array(readable, dtype=np.int64), tuple(unreadable))

    def _crop(self, image: "Image", seed: int | None) -> np.ndarray:
        """Crop, resize and normalise: [3, size, size], or [1, size, size]."""
        from PIL.Image import Resampling

        flip = False
        if self.grey:
            image = image.convert("L")
        if seed is None:
            box = centre_box(*image.size, 1.0 if self.grey else SHORTER_SIDE)
        else:
            rng = np.random.default_rng(seed % 2**64)
            box, flip = random_box(*image.size, rng), rng.random() < 0.5
        pixels = np.asarray(image.resize((self.size, self.size), Resampling.BILINEAR, box=box), dtype=np.float32)
        pixels = (pixels.reshape(self.size, self.size, -1) / 255 - self.mean) / self.std
        return np.ascontiguousarray((pixels[:, ::-1] if flip else pixels).transpose(2, 0, 1))


def require_pillow() -> None:
    """Raise an ImportError that says what to install if Pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ImportError("images need Pillow: pip install pillow") from error


def random_box(width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Draw a random part of an image by area (`SCALE`) and proportions (`RATIO`): left, top, right, bottom."""
    for _ in range(10):  # most proportions do not fit a long image
        area = width * height * rng.uniform(*SCALE)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = rng.integers(width - across + 1), rng.integers(height - down + 1)
            return float(left), float(top), float(left + across), float(top + down)
    across, down = min(width, height * RATIO[1]), min(height, width / RATIO[0])
    return (width - across) / 2, (height - down) / 2, (width + across) / 2, (height + down) / 2


def centre_box(width: int, height: int, shorter: float = SHORTER_SIDE) -> tuple[float, float, float, float]:
    """Return the centre of an image: left, top, right, bottom.

    It equals resizing the shorter side to `shorter` (256/224) of the crop's side and cropping the centre. Cropped
    first, a very long image never becomes a very large one.
    """
    half = min(width, height) / shorter / 2
    return width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half


def read_image(path: str) -> "Image":
    """Decode an image as RGB, upright; a ValueError or OSError says why a file cannot be read."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        raise ValueError("not a file")
    if state.st_size == 0:
        raise ValueError("empty file")
    with warnings.catch_warnings():
        # About sizes that are checked below, and about details of a format that do not stop decoding.
        warnings.simplefilter("ignore")
        try:
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                image.load()
                with suppress(Exception):  # damaged EXIF data does not make the image unreadable
                    ImageOps.exif_transpose(image, in_place=True)
                return to_rgb(image)
        except UnidentifiedImageError as error:
            raise ValueError("not an image") from error
        except Image.DecompressionBombError as error:
            raise ValueError(f"more than {MAX_PIXELS:,} pixels") from error
        except (MemoryError, OSError):
            raise
        except Exception as error:  # decoders raise all kinds of errors for damaged files
            raise ValueError(f"damaged image: {error or type(error).__name__}") from error


def to_rgb(image: "Image") -> "Image":
    """Convert any mode to RGB: transparency is laid on white, 16 bits become 8."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64)
        # Whole numbers have 16 bits. The range of floating-point ones is not known: up to 1, or up to 255.
        scale = 255 / 65535 if image.mode != "F" else (255 if values.max() <= 1 else 1)
        return Image.fromarray(np.rint(np.nan_to_num(values * scale)).clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "RGBa", "LA", "La", "PA"):
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


ImageParts = dict[str, tuple[Paths, RawLabels]]  # images and their labels by split


def load_images(
    path: Path,
    plan: Plan | None = None,
    *,
    validation: Path | None = None,
    test: Path | None = None,
    image_size: int = 224,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    grey: bool = False,
) -> Dataset:
    """Load a dataset of images from a directory or a manifest in one of the forms of this module.

    The plan says how to build it; the other arguments are those of `hetxl_train.data.open_dataset` and `ImageSplit`.
    """
    require_pillow()
    notes: list[str] = []

    def read(part: Path) -> ImageParts:
        parts, left_out = read_directory(part) if part.is_dir() else (read_manifest(part), [])
        notes.extend(left_out)
        return parts

    parts = read(path)
    add_splits(parts, path, {"validation": validation, "test": test}, read)
    make = partial(ImageSplit, size=image_size, mean=mean, std=std, grey=grey)
    input = InputSpec("image", (1 if grey else 3, image_size, image_size))
    return assemble(printable(path.stem), input, parts, make, plan or Plan(), notes=notes)


def find_images(path: Path) -> Paths:
    """Return all images of a directory at any depth, or of a manifest in its order, or a single image file."""
    if path.is_dir():
        images = Paths(_walk(path, Counter()))
        if not len(images):
            raise ValueError(f"{path} has no images; looked for {', '.join(sorted(IMAGE_SUFFIXES))}")
        return images
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return Paths([os.fspath(path)])
    column = manifests.require_column(path, manifests.table_columns(path), PATH_COLUMNS)
    paths = Paths(_absolute(path, row[0], number) for number, row in enumerate(manifests.table_rows(path, [column]), 1))
    _check_paths(path, paths)
    return paths


def read_directory(root: Path) -> tuple[ImageParts, list[str]]:
    """Read the images and labels of a directory by split, and notes on what was left out."""
    left_out: Counter[str] = Counter()
    directories = [entry for entry in _entries(root, Counter()) if os.path.isdir(entry)]
    by_split = _split_directories(directories)
    names = set(by_split.values())
    if by_split:
        left_out["directories that are not a split"] += sum(entry.name not in names for entry in directories)
    parts, empty = {}, []
    with progress_bar(f"Reading {root}", None) as advance:
        for split, directory in (by_split or {UNSPLIT: ""}).items():
            paths, labels = [], LabelBuilder(os.fspath(root / directory))
            for entry in _entries(root / directory, left_out):
                if not os.path.isdir(entry):
                    left_out["files outside class directories"] += 1
                    continue
                images = list(_walk(Path(entry.path), left_out))
                if not images:
                    empty.append(os.path.relpath(entry.path, root))
                paths += images
                for _ in images:  # bytes that are not text are escaped, since a report could not hold them
                    labels.add(entry.name.encode("utf-8", "backslashreplace").decode())
                advance(len(images))
            if paths:
                parts[split] = (Paths(paths), labels.build())
    if not parts:
        raise ValueError(
            f"{root} has no images: looked for {root}/CLASS/… and {root}/train/CLASS/… with files that end in "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    notes = [f"left out {what}: {count:,}" for what, count in sorted(left_out.items()) if count]
    if empty:
        notes.append(f"class directories without images: {len(empty):,} ({some(empty)})")
    return parts, notes


def _split_directories(directories: Sequence["os.DirEntry[str]"]) -> dict[str, str]:
    """Return the directory of each split; none if the directories are classes.

    A class may be called "train" or "test": directories are splits only if they hold directories, and "train" is one of
    them or all are.
    """
    named = {
        entry.name: SPLIT_NAMES[entry.name.lower()]
        for entry in directories
        if entry.name.lower() in SPLIT_NAMES and any(map(os.path.isdir, _entries(Path(entry.path), Counter())))
    }
    if "train" not in named.values() and len(named) < len(directories):
        return {}
    by_split: dict[str, str] = {}
    for name, split in named.items():
        if split in by_split:
            raise ValueError(f"directories {by_split[split]!r} and {name!r} are both the {split} split; rename one")
        by_split[split] = name
    return by_split


def _entries(directory: Path, left_out: Counter[str]) -> list["os.DirEntry[str]"]:
    """Return the entries of a directory, sorted by name, without hidden files."""
    with os.scandir(directory) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    left_out["hidden files"] += len(entries) - len(visible)
    return visible


def _walk(directory: Path, left_out: Counter[str], parents: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """Yield the images of a directory at any depth. `parents`: its parents, to detect a link that leads back."""
    state = os.stat(directory)
    here = (state.st_dev, state.st_ino)
    if here in parents:
        left_out["links that lead back to a parent directory"] += 1
        return
    for entry in _entries(directory, left_out):
        if os.path.isdir(entry):  # unlike the entry's own method, without an error for a link to itself
            yield from _walk(Path(entry.path), left_out, (*parents, here))
        elif not os.path.isfile(entry):
            left_out["broken links and special files"] += 1
        elif os.path.splitext(entry.name)[1].lower() not in IMAGE_SUFFIXES:
            left_out["files that are not images"] += 1
        else:
            yield entry.path


def read_manifest(path: Path) -> ImageParts:
    """Read the images and labels of a table by split."""
    columns = manifests.table_columns(path)
    chosen = [manifests.require_column(path, columns, names) for names in (PATH_COLUMNS, manifests.LABEL_COLUMNS)]
    if (split := manifests.find_column(columns, manifests.SPLIT_COLUMNS)) is not None:
        chosen.append(split)
    paths: dict[str, list[str]] = {}
    labels: dict[str, LabelBuilder] = {}
    with closing(counted(manifests.table_rows(path, chosen), f"Reading {path}")) as rows:
        for number, (file, value, *rest) in enumerate(rows, 1):
            key = split_name(path, rest[0], number) if rest else UNSPLIT
            if key not in paths:
                paths[key], labels[key] = [], LabelBuilder(str(path), manifests.separator_of(path))
            paths[key].append(_absolute(path, file, number))
            labels[key].add(value)
    if not paths:
        raise ValueError(f"{path} has no rows")
    parts = {key: (Paths(files), labels[key].build()) for key, files in paths.items()}
    for files, _ in parts.values():
        _check_paths(path, files)
    return parts


def _absolute(manifest: Path, file: Any, number: int) -> str:
    if not isinstance(file, str) or not file or "\0" in file:
        raise ValueError(f"{manifest}, row {number} (counted from 1) must have a path, found {file!r}")
    return os.path.join(manifest.parent, file)


def _check_paths(manifest: Path, paths: Paths) -> None:
    """Raise for a manifest whose first files are all missing: single ones are reported when they are read."""
    first = [paths[index] for index in range(min(len(paths), CHECKED_PATHS))]
    if first and not any(os.path.isfile(path) for path in first):
        raise FileNotFoundError(
            f"{manifest} names files that do not exist, first {printable(first[0])}; paths are relative to the manifest"
        )
