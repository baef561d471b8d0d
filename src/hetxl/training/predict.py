"""`hetxl predict`: a trained run on new inputs, written to a file as it goes."""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from hetxl.data import open_inputs
from hetxl.functional._checks import integer_at_least
from hetxl.nn import Prediction
from hetxl.training.distributed import find_device
from hetxl.training.features import feature_batches
from hetxl.training.order import derive
from hetxl.training.progress import Narrator
from hetxl.training.run import load_run

FORMATS = (".csv", ".jsonl", ".parquet")


def predict(
    run: str | Path,
    inputs: str,
    out: Path,
    *,
    top_k: int = 5,
    method: str = "mc",
    num_samples: int | None = None,
    seed: int = 0,
    workers: int = 2,
    device: str = "auto",
    narrator: Narrator | None = None,
) -> int:
    """Write the top classes of every input, with probabilities and where the doubt comes from.

    Args:
        run: directory of a trained run.
        inputs: array file, picture, folder of pictures or manifest, of the kind the run was trained on.
        out: .csv, .jsonl or .parquet.
        top_k: how many classes.
        method: of `head.predict`.
        num_samples: S, the run's `eval_samples` without.
        seed: of the draws.
        workers: processes that decode pictures.
        device: where to compute.
        narrator: shows how far it is.

    Returns:
        How many rows were written.
    """
    narrator = narrator or Narrator()
    out = Path(out)
    if out.suffix not in FORMATS:
        raise ValueError(f"--out must end with {', '.join(FORMATS)}, found {out}")
    integer_at_least("top_k", top_k, 1)
    trained = load_run(run, find_device(device))
    split = open_inputs(inputs, trained.spec)
    place = next(trained.model.parameters()).device
    generator = torch.Generator(place).manual_seed(derive(seed, 16))
    head: Any = trained.model.head
    count, written = min(top_k, len(trained.class_names)), 0
    batches = feature_batches(trained.model.backbone, split, np.arange(len(split)), workers, place)
    with _writer(out, count) as writer, narrator.bar("predicting", len(split)) as bar:
        for features, rows in batches:
            found = head.predict(
                features.to(place), top_k=count, method=method, num_samples=num_samples, generator=generator
            )
            shown = [split.show(int(row)) for row in rows]
            sources = [_encodable(item.image or item.text) for item in shown]
            writer.write(list(rows_of(found, trained.class_names, rows, sources)))
            written += len(rows)
            bar.to(int(rows[-1]) + 1)
    if written < len(split):
        narrator.say(f"{len(split) - written:,} of {len(split):,} inputs could not be read and are left out")
    return written


def rows_of(
    found: Prediction, names: Sequence[str], rows: np.ndarray, sources: Sequence[str | None]
) -> Iterator[dict[str, Any]]:
    """One record for each input.

    `entropy` is that of the averaged probabilities in nats, `from_noise` the part of it that the noise explains, and
    `confused_with` the class besides the first that the input is taken for: the most probable one, with `correlation`
    of the two logits.
    """
    classes, probs = found.classes.cpu(), found.probs.cpu()
    entropy, noise = found.entropy.cpu(), found.mutual_information.cpu()
    correlation = found.correlation.cpu() if classes.shape[-1] > 1 and found.logits.noise is not None else None
    for place, row in enumerate(rows):
        top = [(names[int(label)], round(float(p), 6)) for label, p in zip(classes[place], probs[place], strict=True)]
        yield {
            "row": int(row),
            "source": sources[place],
            "top": top,
            "entropy": round(float(entropy[place]), 5),
            "from_noise": round(float(noise[place]), 5),
            "confused_with": top[1][0] if len(top) > 1 else None,
            "correlation": None if correlation is None else round(float(correlation[place, 0, 1]), 4),
        }


def _encodable(text: str | None) -> str | None:
    """A text as UTF-8 can hold it: what it has no bytes for, as in a path of another encoding, is escaped."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


class _Writer:
    """Records to a file that gets its name when it is whole."""

    def __init__(self, path: Path, top_k: int):
        self.path, self.top_k = path, top_k
        path.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> "_Writer":
        self._open()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()
        if error is None:
            os.replace(self.temporary, self.path)
        else:
            self.temporary.unlink(missing_ok=True)

    def _open(self) -> None:
        self.file = open(self.temporary, "w", encoding="utf-8", newline="")  # noqa: SIM115, closed by _close

    def _close(self) -> None:
        self.file.close()

    def write(self, records: list[dict[str, Any]]) -> None:
        """Add records: one JSON object a line."""
        for record in records:
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def flat(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record with a column for each of the top classes: class_1, probability_1, …"""
        columns = {"row": record["row"], "source": record["source"]}
        for number in range(self.top_k):
            columns[f"class_{number + 1}"], columns[f"probability_{number + 1}"] = record["top"][number]
        return columns | {key: record[key] for key in ("entropy", "from_noise", "confused_with", "correlation")}

    def columns(self) -> list[str]:
        """The columns of a flat record, which a table has even without rows."""
        rest = ("row", "source", "entropy", "from_noise", "confused_with", "correlation")
        return list(self.flat({"top": [("", 0.0)] * self.top_k} | dict.fromkeys(rest)))


class _CsvWriter(_Writer):
    def _open(self) -> None:
        super()._open()
        self.table = csv.DictWriter(self.file, self.columns())
        self.table.writeheader()

    def write(self, records: list[dict[str, Any]]) -> None:
        self.table.writerows(map(self.flat, records))


class _ParquetWriter(_Writer):
    def _open(self) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise ImportError("a .parquet file needs pyarrow: pip install pyarrow") from None
        self.arrow: Any = pyarrow
        kinds = {"row": pyarrow.int64(), "entropy": pyarrow.float64(), "from_noise": pyarrow.float64()}
        kinds["correlation"] = pyarrow.float64()
        self.schema = pyarrow.schema(
            [
                (name, kinds.get(name, pyarrow.float64() if name.startswith("probability") else pyarrow.string()))
                for name in self.columns()
            ]
        )
        self.out = pyarrow.parquet.ParquetWriter(self.temporary, self.schema)

    def _close(self) -> None:
        self.out.close()

    def write(self, records: list[dict[str, Any]]) -> None:
        self.out.write_table(self.arrow.Table.from_pylist([self.flat(record) for record in records], self.schema))


def _writer(path: Path, top_k: int) -> _Writer:
    kinds = {".csv": _CsvWriter, ".jsonl": _Writer, ".parquet": _ParquetWriter}
    return kinds[path.suffix](path, top_k)
