import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from hetxl_train.report.compare import group_runs
from hetxl_train.report.contrastive import contrastive_html, metric_table, write_contrastive_report
from hetxl_train.report.read import Run, find_runs

SCRIPT = "<script>alert(1)</script>"
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def write_run(folder: Path, head: str, seed: int, top1: float, **more) -> Path:
    """The directory of a run, as training writes it."""
    folder.mkdir(parents=True)
    recall = {f"{way}@{k}": top1 * k / 10 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    zero_shot = {"classes": 2000, "top1": top1, "top5": 2 * top1, "unseen_top1": top1 / 2, "samples": 0}
    result = {
        "kind": "contrastive",
        "label": {"det": "DET", "het-xl": "HET-XL"}[head],
        "head": head,
        "seed": seed,
        "dataset": "icons",
        "data": {"rows": {"train": 19668, "test": 2211}, "notes": ["a note"]},
        "metrics": {"validation": recall, "test": recall | {"zero_shot": zero_shot}},
        "steps": 20,
    }
    (folder / "result.json").write_text(json.dumps(result | more))
    (folder / "config.json").write_text(json.dumps({"towers": {"features": 8}}))
    lines = [{"kind": "step", "step": step, "loss": 5 - step / 10, "scale": 3 + step} for step in range(1, 20)]
    lines += [{"kind": "evaluation", "step": step, "image_to_text@1": step / 100} for step in (10, 20)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entry = {"row": 1, "image": IMAGE, "path": None, "label": SCRIPT, "top": [["bell", 0.7], ["moon", 0.1]]}
    examples = {"zero_shot": [entry | {"hit": False, "unseen": True}, entry | {"label": "bell", "hit": True}]}
    if head == "het-xl":
        examples["noisiest"] = [{"row": 2, "image": IMAGE, "label": "moon", "noise": 0.25, "swapped": True}]
        examples["calmest"] = [{"row": 3, "image": None, "label": "sun", "noise": 0.125, "swapped": False}]
    (folder / "examples.json").write_text(json.dumps(examples))
    return folder


@pytest.fixture
def runs(tmp_path):
    directories = []
    for seed in (0, 1):
        directories.append(write_run(tmp_path / f"det-{seed}", "det", seed, 0.2 + 0.01 * seed))
        swaps = {"swaps": {"noise_auroc": 0.6, "distance_auroc": 0.9, "swapped": 0.2}}
        directories.append(write_run(tmp_path / f"het-{seed}", "het-xl", seed, 0.25 + 0.02 * seed, **swaps))
    return directories


def test_page_shows_tables_curves_and_examples(runs, tmp_path):
    path = write_contrastive_report(runs, tmp_path, created=datetime(2024, 5, 6, 7, 8, tzinfo=timezone.utc))
    assert path == tmp_path / "report.html"
    text = path.read_text()
    for words in (
        "DET and HET-XL, contrastive, on icons",
        "19,668 train pairs",
        "created 2024-05-06 07:08 UTC from 4 runs",
        "Zero-shot classification",
        "2,000 classes: chance is 0.050%",
        '26.00<span class="error"> ± 1.00 %</span>',
        "Validation pairs",
        "Test images",
        "1 of these 2 are right",
        "a name that no training pair has",
        "AUROC of the noise",
        "noise 0.2500",
        "swapped",
        "Training loss over steps",
        "Learned scale over steps",
        IMAGE,
        "a note",
    ):
        assert words in text, words
    assert SCRIPT not in text
    assert "confusions.json is missing" not in text


def test_missing_results_are_named(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    text = contrastive_html(find_runs(folder))
    assert "Zero-shot accuracy left out: no run has it in its result.json." in text
    assert "Images left out" in text
    assert "Noise of pairs left out" in text
    assert "Training loss over steps left out" in text


def test_p_values_need_common_seeds(runs):
    keys = ("metrics", "test", "zero_shot", "top1")
    several = metric_table(group_runs(find_runs(runs)), [("top-1", keys)], "x")
    assert "<td>0.058</td>" in several  # t = 11 with one degree of freedom
    single = metric_table(group_runs(find_runs(runs[:2])), [("top-1", keys)], "x")
    assert single.count("<td>–</td>") == 2
    assert metric_table(group_runs(find_runs(runs)), [("other", ("metrics", "other"))], "x") is None


def test_classifier_runs_are_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "result.json").write_text('{"label": "DET", "metrics": {}}')
    with pytest.raises(ValueError, match="is not a contrastive run; use hetxl report"):
        contrastive_html(find_runs(folder))


def page(label, examples, seed=0):
    result = {"kind": "contrastive", "label": label, "seed": seed}
    return Run(Path(label), result=result, examples=examples)


def test_heads_with_noise_come_first_and_the_others_are_folded():
    entry = {"label": "bell", "image": IMAGE, "top": [["bell", 0.9]], "hit": True}
    text = contrastive_html([page("DET", {"zero_shot": [entry]}, 3), page("HET-XL", {"zero_shot": [entry]}, 3)])
    assert text.index("<h3>HET-XL, seed 3") < text.index("The same by DET, seed 3")
    assert 'alt="bell"' in text
    assert "90.0%" in text


def test_broken_entries_are_left_out():
    bad = {
        "label": "<b>", "image": "javascript:alert(1)", "path": "a/<b>.png", "top": [["x"], ["moon", 2.0], 5],
        "hit": None, "noise": "much",
    }  # fmt: skip
    text = contrastive_html([page("HET-XL", {"zero_shot": [bad, "no entry"], "noisiest": "x"})])
    assert "javascript" not in text
    assert "&lt;b&gt;" in text
    assert "width:100.0%" in text  # a probability beyond 1 is drawn as 1
    assert "0 of these 1 are right" in text
    assert "Noise of pairs left out" in text


def test_page_shows_pairs_with_most_and_least_noise():
    examples = {
        "noisiest": [{"label": "moon", "image": IMAGE, "noise": 0.5, "swapped": True}],
        "calmest": [{"label": "", "image": None, "noise": 0.1, "swapped": None}],
    }
    text = contrastive_html([page("HET-XL", examples), page("DET", {})])
    assert "Most noise, HET-XL" in text
    assert "Least noise, HET-XL" in text
    assert text.count(">swapped<") == 1
    assert "noise 0.1000" in text
