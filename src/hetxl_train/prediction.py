"""Predict new inputs with a trained run, and write the predictions to a file batch by batch: `hetxl predict`."""

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetxl._checks import integer_at_least
from hetxl._files import whole_file, whole_text
from hetxl._seeds import derive_seed
from hetxl.nn import Head, Prediction
from hetxl_train.calibration import FILE, Calibration
from hetxl_train.console import Console
from hetxl_train.data import open_inputs
from hetxl_train.data.labels import SEPARATOR
from hetxl_train.data.open import columns_of, split_spec, tokenizer_of
from hetxl_train.data.pycode import text_tokens
from hetxl_train.data.read import Data
from hetxl_train.data.tokens import Windows
from hetxl_train.distributed import find_device
from hetxl_train.model import feature_batches
from hetxl_train.runs import Trained, load_run

FORMATS = (".csv", ".jsonl", ".parquet")
DOUBT = ("entropy", "from_noise", "confused_with", "correlation")
GUARANTEED = ("set_size", "set", "answer")
"""Columns of a calibrated run: its prediction set, and its answer, which is empty if the confidence is too low."""


def predict(
    run: str | Path, inputs: Data, out: Path, *, top_k: int = 5, method: str = "mc", num_samples: int | None = None,
    target: str = "observed", coverage: float | None = None, risk: float | None = None, seed: int = 0,
    workers: int = 2, device: str = "auto", skip_invalid: bool = False, console: Console | None = None,
) -> int:  # fmt: skip
    """Write the top classes of every input, with probabilities and sources of uncertainty; return the number of inputs.

    Args:
        inputs: data in any form of `hetxl_train.data.read`, of the kind that the run was trained on.
        out: a .csv, .jsonl or .parquet file.
        method: as in `head.predict`, like `target`, `seed` and `num_samples` [default: the run's `eval_samples`].
        coverage: add prediction sets; must be the coverage of `hetxl calibrate`.
        risk: add answers where the confidence is high enough; must be the risk of `hetxl calibrate`.
        skip_invalid: leave rows empty whose features or probabilities are NaN or infinite; otherwise raise an error
            that names the rows.
    """
    console = console or Console()
    out = Path(out)
    if out.suffix not in FORMATS:
        raise ValueError(f"--out must end with {', '.join(FORMATS)}, found {out}")
    options = {"method": method, "num_samples": num_samples, "target": target, "coverage": coverage, "risk": risk}
    options["skip_invalid"] = skip_invalid
    predictor = Predictor(run, top_k=top_k, seed=seed, device=device, console=console, **options)
    trained, written = predictor.trained, 0
    config = trained.run.config
    split = open_inputs(inputs, trained.spec, columns=columns_of(config), tokenizer=tokenizer_of(config))
    batches = feature_batches(trained.model.backbone, split, np.arange(len(split)), workers, predictor.device)
    with (
        _writing(out, predictor.top_k, predictor.calibration is not None) as write,
        console.bar("predicting", len(split)) as bar,
    ):
        for features, rows in batches:
            write(predictor.records(features, rows, [split.name(int(row)) for row in rows]))
            written += len(rows)
            bar.to(int(rows[-1]) + 1)
    if written < len(split):
        console.say(f"{len(split) - written:,} of {len(split):,} inputs could not be read and are left out")
    if predictor.invalid:
        console.say(f"{predictor.invalid:,} of {len(split):,} inputs give NaN or infinite values; their rows are empty")
    return written


class Predictor:
    """Predict new inputs with a trained run; the arguments are those of `predict`."""

    def __init__(
        self, run: str | Path, *, top_k: int = 5, method: str = "mc", num_samples: int | None = None,
        target: str = "observed", coverage: float | None = None, risk: float | None = None, seed: int = 0,
        device: str = "auto", skip_invalid: bool = False, console: Console | None = None,
    ):  # fmt: skip
        self.skip_invalid, self.invalid = skip_invalid, 0  # `invalid` counts the invalid inputs so far
        integer_at_least("top_k", top_k, 1)
        self.trained = load_run(run, find_device(device), console or Console())
        self.calibration = _calibration(self.trained, coverage, risk)
        self.top_k = min(top_k, len(self.trained.class_names))
        self.device = self.trained.model.device
        self.options = {"method": method, "num_samples": num_samples, "target": target}
        for module in self.trained.model.modules():  # the members of an ensemble, too
            if isinstance(module, Head):
                module.eval_seed = seed
        self.uniform = torch.Generator().manual_seed(derive_seed(seed, 24))

    @cached_property
    def encode(self) -> Callable[[Sequence[str]], torch.Tensor] | None:
        """The function that encodes texts as inputs [n, L]; None for a run that takes no texts."""
        spec, config = self.trained.spec, self.trained.run.config
        if spec.kind == "tokens":
            cut = text_tokens if split_spec(config.data)[0] == "pycode" else str.split
            return Windows(self.trained.class_names, spec.shape[0], cut)
        return tokenizer_of(config) if spec.kind == "text" else None

    def records(self, features: torch.Tensor, rows: np.ndarray, sources: Sequence[str | None]) -> list[dict[str, Any]]:
        """Return a record for each input by its features [b, D], with prediction sets and answers if calibrated.

        If features or probabilities are NaN or infinite, raise an error that names the rows, or with `skip_invalid`
        return empty records for them.
        """
        head: Any = self.trained.model.head
        valid = torch.isfinite(features).reshape(len(rows), -1).all(-1)
        features = features.masked_fill(~valid.reshape(-1, *[1] * (features.dim() - 1)), 0).to(self.device)
        prediction = head.predict(features, top_k=self.top_k, **self.options)
        records = list(rows_of(prediction, self.trained.class_names, rows, sources))
        if self.calibration is not None:
            whole = head.predict(features, **self.options) if self.calibration.needs_all else prediction
            _guarantee(records, self.calibration, whole, self.trained.class_names, self.uniform)
        valid &= torch.isfinite(prediction.probs.cpu()).all(-1)
        if not valid.all():
            self._leave_out(records, rows, valid.numpy())
        return records

    def _leave_out(self, records: list[dict[str, Any]], rows: np.ndarray, valid: np.ndarray) -> None:
        """Empty the records [b] of invalid rows in place; raise without `skip_invalid`."""
        invalid = rows[~valid]
        if not self.skip_invalid:
            some = ", ".join(map(str, invalid[:5])) + (", …" if len(invalid) > 5 else "")
            raise ValueError(
                f"features or probabilities of row {some} are NaN or infinite; repair these inputs, or pass "
                "--skip-invalid to leave their rows empty"
            )
        self.invalid += len(invalid)
        for index in np.flatnonzero(~valid):
            record = records[index]
            empty = dict.fromkeys(record) | {"row": record["row"], "source": record["source"]}
            records[index] = empty | {"top": [(None, None)] * len(record["top"])}


def rows_of(
    prediction: Prediction, names: Sequence[str], rows: np.ndarray, sources: Sequence[str | None]
) -> Iterator[dict[str, Any]]:
    """Yield one record for each input.

    `entropy` is the entropy of the averaged probabilities in nats, and `from_noise` the part of it that the noise
    explains. `confused_with` is the second most probable class, and `correlation` the correlation of its logit with
    that of the first class.
    """
    classes, probs = prediction.classes.tolist(), prediction.probs.tolist()
    entropy, noise = prediction.entropy.tolist(), prediction.mutual_information.tolist()
    correlation = None
    if prediction.classes.shape[-1] > 1 and prediction.logits.noise is not None:
        correlation = prediction.correlation[:, 0, 1].tolist()
    for index, (row, source) in enumerate(zip(rows, sources, strict=True)):
        top = [(names[label], round(p, 6)) for label, p in zip(classes[index], probs[index], strict=True)]
        yield {
            "row": int(row),
            # Escape characters that UTF-8 cannot encode, such as those of a path in another encoding.
            "source": source and source.encode("utf-8", "backslashreplace").decode(),
            "top": top,
            "entropy": _rounded(entropy[index], 5),
            "from_noise": _rounded(noise[index], 5),
            "confused_with": top[1][0] if len(top) > 1 else None,
            "correlation": None if correlation is None else _rounded(correlation[index], 4),
        }


def _rounded(value: float, digits: int) -> float | None:
    """Return a rounded number; None if it is not finite, such as the correlation of logits that overflow."""
    return round(value, digits) if math.isfinite(value) else None


def _calibration(trained: Trained, coverage: float | None, risk: float | None) -> Calibration | None:
    """Return the calibration of a run, None if neither coverage nor risk is requested; raise if they differ from it.

    A multi-label run with a calibration always uses its thresholds.
    """
    run = trained.run.path
    if coverage is None and risk is None:
        known = trained.link == "sigmoid" and (run / FILE).exists()
        return Calibration.load(run) if known else None
    calibration = Calibration.load(run)
    calibrated = None if calibration.conformal is None else calibration.conformal.coverage
    for name, asked, known in (("coverage", coverage, calibrated), ("risk", risk, calibration.risk)):
        if asked is not None and asked != known:
            raise ValueError(
                f"{run} is calibrated for {name} {known}, got {asked}; run hetxl calibrate --{name} {asked}"
            )
    conformal = None if coverage is None else calibration.conformal
    return replace(calibration, conformal=conformal, risk=risk)


def _guarantee(
    records: list[dict[str, Any]], calibration: Calibration, prediction: Prediction, names: Sequence[str],
    uniform: torch.Generator,
) -> None:  # fmt: skip
    """Add prediction sets and answers to records in place; for sets, `prediction` must cover all classes."""
    for record in records:
        sure = calibration.confidence is not None and record["top"][0][1] >= calibration.confidence
        record |= dict.fromkeys(GUARANTEED) | {"answer": record["top"][0][0] if calibration.risk and sure else None}
    chosen_classes: Sequence[Any] = ()
    if calibration.thresholds is not None:
        chosen_classes = [np.flatnonzero(row >= calibration.thresholds) for row in prediction.probs.cpu().numpy()]
    elif calibration.conformal is not None:
        u = torch.rand(len(records), generator=uniform, dtype=torch.float64).to(prediction.probs.device)
        chosen_classes = calibration.conformal.sets(prediction.probs, u)
    for record, classes in zip(records, chosen_classes, strict=bool(chosen_classes)):
        record |= {"set_size": len(classes), "set": SEPARATOR.join(str(names[int(label)]) for label in classes)}


@contextmanager
def _writing(path: Path, top_k: int, guaranteed: bool) -> Iterator[Callable[[list[dict[str, Any]]], object]]:
    """Yield a function that appends records to a file; the file gets its name when it is complete."""
    keys = ("row", "source", *DOUBT, *(GUARANTEED if guaranteed else ()))
    columns = list(_flat({"top": [("", 0.0)] * top_k} | dict.fromkeys(keys)))
    if path.suffix == ".parquet":
        with whole_file(path) as temporary, _parquet(temporary, columns) as write:
            yield write
        return
    with whole_text(path) as file:
        if path.suffix == ".csv":
            table = csv.DictWriter(file, columns)
            table.writeheader()
            yield lambda records: table.writerows(map(_flat, records))
        else:
            encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
            yield lambda records: file.writelines(encode(row) + "\n" for row in records)


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with a column for each of the top classes: class_1, probability_1, …"""
    columns = {"row": record["row"], "source": record["source"]}
    for number, (name, probability) in enumerate(record["top"], 1):
        columns |= {f"class_{number}": name, f"probability_{number}": probability}
    return columns | {key: record[key] for key in (*DOUBT, *GUARANTEED) if key in record}


@contextmanager
def _parquet(path: Path, columns: list[str]) -> Iterator[Callable[[list[dict[str, Any]]], object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds: dict[str, pa.DataType] = {"row": pa.int64(), "set_size": pa.int64()}
    kinds |= dict.fromkeys(("source", "confused_with", "set", "answer"), pa.string())
    kinds |= {name: pa.string() for name in columns if name.startswith("class_")}
    schema = pa.schema([(name, kinds.get(name, pa.float64())) for name in columns])
    with pq.ParquetWriter(path, schema) as file:
        yield lambda records: file.write_table(pa.Table.from_pylist(list(map(_flat, records)), schema))
