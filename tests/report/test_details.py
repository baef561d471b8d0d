from pathlib import Path

from hetxl.report import details
from hetxl.report.groups import group_runs
from hetxl.report.markup import join
from hetxl.report.read import Run
from support.runs import SCRIPT, picture


def groups(**fields):
    result = {"label": "HET-XL", "seed": 0, **fields.pop("result", {})}
    return group_runs([Run(Path("out/het-xl-0"), result=result, **fields)])


def card(**entry):
    shown = {"row": 1, "label": "cat", "top": [["cat", 0.7], ["dog", 0.2]], "entropy": 0.5, "hit": True} | entry
    return join(details.examples(groups(examples={"most_certain": [shown]}), []))


def test_pairs_show_correlation_and_confusion():
    pair = {
        "first": SCRIPT,
        "second": "b",
        "correlation": -0.93,
        "examples": 1200,
        "confused": 7,
        "confused_share": 0.31,
    }
    text = join(details.confusions(groups(confusions=[pair]), []))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    for shown in ("−0.93", "1,200", ">7<", "31%", "HET-XL, seed 0"):
        assert shown in text


def test_pairs_without_correlation_are_left_out():
    pairs = [{"first": "a", "second": "b", "correlation": None}, {"correlation": 0.5}]
    assert "left out" in join(details.confusions(groups(confusions=pairs), []))


def test_missing_numbers_of_a_pair_are_dashes():
    pair = {"first": 3, "second": "b", "correlation": 0.5}
    assert join(details.confusions(groups(confusions=[pair]), [])).count("<td>–</td>") == 3


def test_the_best_head_is_open_and_the_others_are_folded():
    pair = {"first": "a", "second": "b", "correlation": 0.5}
    runs = [Run(Path(label), result={"label": label}, confusions=[pair]) for label in ("HET", "HET-XL")]
    _, first, _, folded = details.confusions(group_runs(runs), ["HET-XL", "HET"])
    assert first == "<h3>HET-XL</h3>"
    assert "Pairs of HET<" in folded


def test_an_example_with_its_picture():
    image = picture(1, 2, 3)
    text = card(image=image, path='a"<b>.png')
    assert f'src="{image}"' in text
    assert "a&quot;&lt;b&gt;.png" in text
    assert "right" in text
    assert "70.0%" in text


def test_only_pictures_inside_the_page_are_shown():
    for source in ("https://example.org/a.png", "data:text/html;base64,AAAA", 'data:image/png;base64,A" onerror="x', 5):
        assert "<img" not in card(image=source)


def test_errors_and_several_labels():
    text = card(hit=False, label=["cat", "dog"], text="<i>")
    assert "cat and dog" in text
    assert "wrong" in text
    assert "&lt;i&gt;" in text


def test_broken_entries_do_no_harm():
    text = card(top=[["a"], "b", ["c", None], ["d", 7.0]], entropy=None, hit=None, label=None, text=5)
    assert "width:100.0%" in text
    assert "left out" in join(details.examples(groups(examples={"most_certain": 3, "least_certain": [4]}), []))


def test_long_texts_lose_their_middle():
    text = details.shortened("a" * 1000 + "b" * 1000, 100)
    assert text == "a" * 50 + " … " + "b" * 50
    assert details.shortened("short") == "short"


def test_runs_are_listed_with_what_is_missing():
    made = groups(
        result={"steps": 2000, "data": {"notes": ["split by <file>"]}},
        config={"rank": 20, "name": "<x>"},
        problems=("curves.json is missing",),
    )
    text = join(details.provenance(made))
    assert "curves.json is missing" in text
    assert "2,000" in text
    assert "split by &lt;file&gt;" in text
    assert "&quot;rank&quot;: 20" in text
    assert "&lt;x&gt;" in text
