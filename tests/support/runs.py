"""Run directories as training writes them, made up, with class names that are hard to show."""

import base64
import json
import math
import random
import struct
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SCRIPT = "<script>alert(1)</script>"
SCALED = "DET + temperature scaling"
NAMES = (
    SCRIPT,
    "say \"hello\" & 'goodbye'",
    "Grüße, 世界, שלום",
    "a_very_long_identifier_without_any_break_" * 3,
    "self",
    "return",
    "tabby cat",
    "tiger cat",
)
HEADS = {  # label: head, parameters, NLL after training, seconds
    "DET": ("det", 1_204_864, 4.270, 310.0),
    SCALED: ("det", 1_204_864, 4.262, 310.0),
    "DET + label smoothing": ("det", 1_204_864, 4.301, 312.0),
    "HET": ("het", 2_410_112, 4.291, 520.0),
    "HET-H": ("het-h", 1_350_400, 4.252, 455.0),
    "HET-XL": ("het-xl", 1_350_401, 4.212, 402.0),
}
FILES = ("config.json", "result.json", "log.jsonl", "curves.json", "confusions.json", "examples.json")


def colour_image(red: int, green: int, blue: int, side: int = 24) -> str:
    """A square of one colour as a data: URI."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = (b"\0" + bytes((red, green, blue)) * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_run(
    folder: Path,
    label: str = "HET-XL",
    seed: int = 0,
    *,
    dataset: str = "pycode",
    best_nll: float | None = None,
    nll: float | None = None,
    steps: int = 2000,
    **result: object,
) -> Path:
    """One finished run.

    Args:
        folder: to write it into.
        label: of the head; one of HEADS, or another that is made up as HET-XL.
        seed: of the run.
        dataset: its name.
        best_nll: that of the true model.
        nll: after training; by default that of HEADS with a spread over seeds.
        steps: how many it trained.
        result: other entries of result.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head, parameters, usual, seconds = HEADS.get(label, HEADS["HET-XL"])
    draw = random.Random(f"{label} {seed}")
    reached = nll if nll is not None else usual + draw.gauss(0, 0.004) + 0.01 * seed
    write_json(folder / "config.json", _config(head, label, seed, dataset, steps))
    metrics = _metrics(label, reached, draw)
    entries = {
        "label": label,
        "head": head,
        "seed": seed,
        "dataset": dataset,
        "data": _data(),
        "parameters": {"total": parameters, "head": parameters - 600_000, "backbone": 600_000},
        "metrics": {"test": metrics, "validation": metrics | {"nll": reached - 0.02}},
        "train_seconds": seconds * (1 + 0.02 * seed),
        "predict_seconds_per_1000": 0.05 if label == "DET" else 0.21,
        "temperature": 0.7,
        "steps": steps,
        "examples": 128 * steps,
        "best_nll": best_nll,
        "derived_from": f"det-seed{seed}" if label == SCALED else None,
    }
    entries |= result
    write_json(folder / "result.json", entries)
    if entries["derived_from"] is None:
        _write_log(folder / "log.jsonl", label, reached - 0.02, steps, seconds, draw)
    write_json(folder / "curves.json", _curves(metrics["calibration_error"]))
    write_json(folder / "confusions.json", _pairs(draw, noise=not label.startswith("DET")))
    write_json(folder / "examples.json", _examples(draw))
    write_losses(folder, reached, draw)
    return folder


def write_losses(folder: Path, nll: float, draw: random.Random, rows: int = 200) -> None:
    """The losses of single examples: the same examples are hard for every head."""
    spread = np.random.default_rng(0).exponential(size=rows) + np.array([draw.gauss(0, 0.1) for _ in range(rows)])
    losses = nll + spread - spread.mean()
    (folder / "records").mkdir(exist_ok=True)
    tensors = {"rows": np.arange(rows), "log_prob": -losses}
    save_file(tensors, folder / "records" / "test.safetensors", metadata={"format": "hetxl-records-1"})


def write_comparison(folder: Path, labels: tuple[str, ...] = tuple(HEADS), seeds: int = 3, **options: object) -> Path:
    """A comparison of heads over seeds."""
    for label in labels:
        for seed in range(seeds):
            write_run(folder / "runs" / f"{label.lower().replace(' + ', '-')}-seed{seed}", label, seed, **options)
    write_json(folder / "compare.json", {"baseline": "DET", "heads": list(labels), "seeds": list(range(seeds))})
    return folder


def _config(head: str, label: str, seed: int, dataset: str, steps: int) -> dict:
    model = {"head": head, "rank": 20, "note": f"{SCRIPT} & 'quotes'"}
    training = {"steps": steps, "batch_size": 128, "learning_rate": 0.001, "seed": seed}
    return {"data": {"data": dataset}, "head": model, "training": training, "output": {"note": label}}


def _data() -> dict:
    return {
        "rows": {"train": 812_345, "validation": 20_000, "test": 20_000},
        "classes": 8192,
        "frequencies": [
            [1, 410],
            [3, 900],
            [7, 1600],
            [15, 1900],
            [31, 1500],
            [63, 900],
            [127, 500],
            [255, 260],
            [1023, 222],
        ],
        "notes": ["Split by file, not by token.", f"12 files were left out: {SCRIPT} is not UTF-8."],
    }


def _metrics(label: str, nll: float, draw: random.Random) -> dict:
    base = 0.40 - 0.1 * (nll - 4.25)
    error = {"DET": 0.031, "HET": 0.024, "HET-H": 0.018, "DET + label smoothing": 0.041}.get(label, 0.012)
    return {
        "nll": nll,
        "nll_standard_error": 0.021,
        "precision@1": base + draw.gauss(0, 0.001),
        "precision@5": base + 0.22,
        "calibration_error": error + abs(draw.gauss(0, 0.001)),
        "calibration_error_width": error,
        "brier": 0.72 - 0.2 * (base - 0.4),
        "aurc": 0.31,
        "auroc": 0.83,
        "accuracy_head": base + 0.25,
        "accuracy_middle": base - 0.02,
        "accuracy_tail": base - 0.21,
        "examples": 20_000,
    }


def _write_log(path: Path, label: str, nll: float, steps: int, seconds: float, draw: random.Random) -> None:
    records = []
    for step in range(1, steps + 1):
        if step % 2 == 0:
            share = step / steps
            loss = nll + 4.5 * math.exp(-9 * share) + draw.gauss(0, 0.1)
            tau = (
                1.0
                if label.startswith("DET")
                else 0.6 + 0.03 * len(label) + 0.8 * math.exp(-4 * share) + draw.gauss(0, 0.01)
            )
            entry = {"kind": "step", "step": step, "seconds": seconds * share, "examples": 128 * step, "loss": loss}
            records.append(entry | {"temperature": tau, "learning_rate": 0.001, "examples_per_second": 128 / 0.2})
        if step % max(1, steps // 20) == 0:
            share = step / steps
            value = nll + 4.5 * math.exp(-9 * share)
            records.append(
                {"kind": "evaluation", "step": step, "seconds": seconds * share, "split": "validation", "nll": value}
            )
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _curves(error: float) -> dict:
    confidence = [(index + 0.5) / 15 for index in range(15)]
    reliability = [[sure, max(0.0, sure - 2 * error * sure), 1333] for sure in confidence]
    coverage = [(index + 1) / 100 for index in range(100)]
    return {
        "reliability": reliability,
        "risk_coverage": [[share, 0.05 + 0.55 * share**1.5 + error] for share in coverage],
    }


def _pairs(draw: random.Random, noise: bool) -> list[dict]:
    pairs = []
    for first, second in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True):
        correlation = round(draw.uniform(-0.98, 0.6), 3) if noise else None
        entry = {"first": first, "second": second, "correlation": correlation, "weight": draw.random()}
        pairs.append(
            entry | {"examples": draw.randrange(10, 4000), "confused": draw.randrange(60), "confused_share": 0.31}
        )
    return pairs


def _examples(draw: random.Random) -> dict:
    def entry(row: int, hit: bool) -> dict:
        sure = draw.uniform(0.5, 0.95)
        text = f'def f{row}(x):\n    if x == "{SCRIPT}":\n        return self.' if row % 2 else None
        image = None if row % 2 else colour_image(40 * row % 256, 120, 200 - 10 * row)
        shown = {"row": row, "text": text, "image": image, "path": f"folder/{row} <b>.png" if image else None}
        names = draw.sample(NAMES, 3)
        top = [[names[0], sure], [names[1], (1 - sure) / 2], [names[2], (1 - sure) / 4]]
        label = names[0] if hit else [names[1], names[2]]
        return shown | {"label": label, "top": top, "entropy": 2 * (1 - sure), "hit": hit}

    kinds = {"most_certain": True, "least_certain": False, "most_wrong": False}
    return {kind: [entry(row, hit) for row in range(6)] for kind, hit in kinds.items()}
