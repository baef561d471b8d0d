"""`hetxl audit` from data to corrected labels: folds, tables, the page, decisions."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from hetxl_train.audit import NONE, apply_decisions, audit_data, average_precision, fold_of, reason
from hetxl_train.cli.commands import app
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console
from hetxl_train.data import open_dataset
from hetxl_train.data.transforms import ImageTransform
from support.browser import Browser, needs_browser

STEPS = {"steps": 120, "batch_size": 64, "rank": 4, "train_samples": 4, "eval_samples": 16}


def write_arrays(
    path: Path, *, classes: int = 6, rows: int = 240, flipped: int = 24, multi: bool = False
) -> np.ndarray:
    """Write separable features with some wrong labels; return which rows are wrong."""
    generator = np.random.default_rng(0)
    centres, truth = 3 * generator.normal(size=(classes, 8)), np.arange(rows) % classes
    features = (centres[truth] + generator.normal(size=(rows, 8))).astype(np.float32)
    wrong = np.zeros(rows, dtype=bool)
    wrong[generator.permutation(rows)[:flipped]] = True
    labels = np.where(wrong, (truth + 1 + generator.integers(classes - 1, size=rows)) % classes, truth)
    extra = {"label_offsets": np.arange(rows + 1)} if multi else {}
    names = np.array([f"class {k}" for k in range(classes)])
    np.savez(path, features=features, labels=labels, class_names=names, **extra)
    return wrong


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    directory = tmp_path_factory.mktemp("audit")
    wrong = write_arrays(directory / "data.npz")
    config = TrainConfig(data=str(directory / "data.npz"), **STEPS)
    audit_data(config, directory / "audit", folds=2, console=Console(quiet=True))
    return directory, wrong


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_wrong_labels_come_first(arrays: tuple[Path, np.ndarray]):
    directory, wrong = arrays
    rows = rows_of(directory / "audit" / "audit.csv")
    assert list(rows[0])[:5] == ["row", "label", "suggestion", "score", "reason"]
    assert sorted(int(row["row"]) for row in rows) == list(range(240))
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    precision = average_precision(wrong[[int(row["row"]) for row in rows]])
    assert precision is not None
    assert precision > 0.95
    about = json.loads((directory / "audit" / "audit.json").read_text())
    assert abs(about["suspects"] - 24) <= 6
    assert sum(entry["suspects"] for entry in about["classes"]) == about["suspects"]


def test_parquet_has_the_same_ranking(arrays: tuple[Path, np.ndarray]):
    parquet = pytest.importorskip("pyarrow.parquet")
    directory, _ = arrays
    table = parquet.read_table(directory / "audit" / "audit.parquet")
    rows = rows_of(directory / "audit" / "audit.csv")
    assert table["row" if "row" in table.column_names else "rows"].to_pylist() == [int(row["row"]) for row in rows]
    assert table["label"].to_pylist() == [row["label"] for row in rows]


def test_finished_folds_are_not_trained_again(arrays: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch):
    directory, _ = arrays
    before = (directory / "audit" / "audit.csv").read_bytes()
    monkeypatch.setattr("hetxl_train.loop.Trainer.take_step", lambda *_: pytest.fail("trained again"))
    config = TrainConfig(data=str(directory / "data.npz"), **STEPS)
    audit_data(config, directory / "audit", folds=2, console=Console(quiet=True))
    assert (directory / "audit" / "audit.csv").read_bytes() == before


def test_command_audits_data(arrays: tuple[Path, np.ndarray]):
    directory, _ = arrays
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in STEPS.items()]
    audit = str(directory / "audit")
    result = CliRunner().invoke(app, ["audit", str(directory / "data.npz"), "--out", audit, "--folds", "2", *flags])
    assert result.exit_code == 0, result.output
    assert "of 240 labels are suspect" in result.output


def test_top_suspects_are_corrected_in_a_new_file(arrays: tuple[Path, np.ndarray]):
    directory, wrong = arrays
    original = (directory / "data.npz").read_bytes()
    changed, rows = apply_decisions(directory / "audit", directory / "corrected.npz", top=0.08)
    assert rows == 240
    assert 15 <= changed <= 19  # 19 labels are 8 %, and those among them that are suspects are corrected
    assert (directory / "data.npz").read_bytes() == original
    old, new = (open_dataset(directory / name, whole=True).splits["test"] for name in ("data.npz", "corrected.npz"))
    different = np.asarray(old.labels.ids) != np.asarray(new.labels.ids)
    assert different.sum() == changed
    assert wrong[different].mean() > 0.9
    truth = np.arange(240) % 6
    assert (np.asarray(new.labels.ids)[different] == truth[different]).mean() > 0.9


def test_decisions_correct_what_they_name_and_keep_the_rest(arrays: tuple[Path, np.ndarray]):
    directory, _ = arrays
    first, second, *_ = rows_of(directory / "audit" / "audit.csv")
    decisions = directory / "audit" / "decisions.csv"
    lines = [f"{entry['row']},{entry['label']},{entry['suggestion']},{what}"
             for entry, what in ((first, "correct"), (second, "keep"))]  # fmt: skip
    decisions.write_text("row,label,suggestion,decision\n" + "\n".join(lines) + "\n")
    assert apply_decisions(directory / "audit", directory / "one.npz", decisions=decisions) == (1, 240)
    result = CliRunner().invoke(app, ["audit", "apply", str(decisions), "--out", str(directory / "two.npz")])
    assert result.exit_code == 0, result.output
    assert (directory / "two.npz").stat().st_size == (directory / "one.npz").stat().st_size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("row,label\n1,class 1\n", "must have the columns row, label, suggestion and decision"),
        ("row,label,suggestion,decision\n999,class 1,class 2,correct\n", "row '999' is not one of the 240 rows"),
        ("row,label,suggestion,decision\n1,other,class 2,correct\n", "'other' is not a class"),
    ],
)
def test_wrong_decisions_are_refused(arrays: tuple[Path, np.ndarray], tmp_path: Path, text: str, message: str):
    (tmp_path / "decisions.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        apply_decisions(arrays[0] / "audit", tmp_path / "out.npz", decisions=tmp_path / "decisions.csv")


def test_apply_needs_decisions_or_a_share(arrays: tuple[Path, np.ndarray], tmp_path: Path):
    with pytest.raises(ValueError, match="either a decisions file or --top"):
        apply_decisions(arrays[0] / "audit", tmp_path / "out.npz")
    with pytest.raises(FileNotFoundError, match=r"no audit\.json"):
        apply_decisions(tmp_path, tmp_path / "out.npz", top=0.1)


def test_images_are_audited_by_a_run_and_corrected_in_a_manifest(tmp_path: Path):
    generator = np.random.default_rng(0)
    for name in ("train", "other"):
        for index in range(60):
            bright = index % 2
            wrong = name == "other" and index < 4
            folder = tmp_path / name / ("light" if bright != wrong else "dark")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (generator.random((8, 8, 3)) * 60 + 180 * bright).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{index:03}.png")
    flags = ["--steps", "60", "--image-size", "8", "--rank", "2", "--batch-size", "16", "--workers", "0"]
    result = CliRunner().invoke(app, ["train", str(tmp_path / "train"), *flags, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    config = TrainConfig(data=str(tmp_path / "other"), image_size=8, workers=0)
    result = audit_data(config, tmp_path / "audit", run=str(tmp_path / "run"), console=Console(quiet=True))
    assert {Path(row["source"]).stem for row in rows_of(tmp_path / "audit" / "audit.csv")[:4]} == {
        "000", "001", "002", "003"}  # fmt: skip
    assert "data:image/jpeg;base64," in (tmp_path / "audit" / "audit.html").read_text()
    changed, _ = apply_decisions(tmp_path / "audit", tmp_path / "corrected.csv", top=4 / 60)
    assert changed == 4
    corrected = open_dataset(tmp_path / "corrected.csv", transform=ImageTransform(8), whole=True).splits["test"]
    for row in range(60):
        shown = corrected.show(row)
        assert np.asarray(corrected.labels.ids)[row] == int(Path(str(shown.image)).stem) % 2


def test_several_labels_are_audited(tmp_path: Path):
    write_arrays(tmp_path / "data.npz", multi=True)
    config = TrainConfig(data=str(tmp_path / "data.npz"), **STEPS)
    result = audit_data(config, tmp_path / "audit", folds=2, console=Console(quiet=True))
    kinds = {(row["label"] == NONE, row["suggestion"] == NONE) for row in rows_of(tmp_path / "audit" / "audit.csv")}
    assert kinds == {(True, False), (False, True)}
    assert result.audit.suspects > 0
    changed, _ = apply_decisions(tmp_path / "audit", tmp_path / "corrected.npz", top=0.01)
    assert changed > 0
    assert open_dataset(tmp_path / "corrected.npz", whole=True).multi_label


def test_folds_divide_every_class_evenly(tmp_path: Path):
    write_arrays(tmp_path / "data.npz", rows=90)
    split = open_dataset(tmp_path / "data.npz", whole=True).splits["test"]
    fold = fold_of(split.labels, 3, seed=0)
    for label in range(6):
        counts = np.bincount(fold[np.asarray(split.labels.ids) == label], minlength=3)
        assert counts.max() - counts.min() <= 1
    assert (fold_of(split.labels, 3, seed=0) == fold).all()
    assert (fold_of(split.labels, 3, seed=1) != fold).any()


def test_reasons_name_classes_and_probabilities():
    assert reason("cat", "dog", 0.1, 0.8, 0.0, 0.0) == "dog has probability 80.0%, cat 10.0%"
    assert "confused with each other" in reason("cat", "dog", 0.1, 0.8, 0.0, -0.9)
    assert "without noise cat would be 10 times less probable" in reason("cat", "dog", 0.1, 0.8, np.log(10), 0.0)
    assert reason("cat", "dog", 0.9, 0.1, 0.0, 0.0) == "cat is the most probable class, 90.0%"
    assert reason(NONE, "dog", 0.1, 0.9, 0.0, 0.0).startswith("dog is not among the labels")
    assert reason("cat", NONE, 0.1, 0.9, 0.0, 0.0).startswith("cat is among the labels")


@needs_browser
def test_decisions_survive_a_reload_of_the_page(arrays: tuple[Path, np.ndarray]):
    page = arrays[0] / "audit" / "audit.html"
    with Browser() as browser:
        tab = browser.open(page)
        assert tab.evaluate("document.querySelectorAll('.suspect').length") > 10
        tab.evaluate("document.querySelector('.suspect [data-decision=correct]').click()")
        tab.evaluate(
            "cards[1].focus(); cards[1].dispatchEvent(new KeyboardEvent('keydown', {key: 'l', bubbles: true}))"
        )
        decided = "document.querySelectorAll('.suspect:not([data-decision=\"\"])').length"
        assert tab.evaluate(decided) == 2
        again = browser.open(page)
        assert again.evaluate(decided) == 2
        lines = again.evaluate("csv()").splitlines()
        assert lines[0] == "row,label,suggestion,decision"
        assert [line.rpartition(",")[2] for line in lines[1:]] == ["correct", "keep"]
        # A filter hides the other pairs.
        again.evaluate("filters.pair.selectedIndex = 1; filters.pair.dispatchEvent(new Event('change'))")
        shown = "new Set(cards.filter((card) => !card.hidden).map(names.pair)).size"
        assert again.evaluate(shown) == 1
        # A number of the tables leads to its suspects.
        for section, suspects in (("pairs", 3), ("classes", 2)):
            row = f"document.querySelector('#{section} tbody tr')"
            again.evaluate(f"{row}.click()")
            visible = again.evaluate("cards.filter((card) => !card.hidden).length")
            assert visible == int(again.evaluate(f"{row}.cells[{suspects}].textContent"))
