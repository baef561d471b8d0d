import re

from hetxl.studies.charts import plot_dots, plot_lines


def test_dots_in_groups(tmp_path):
    groups = [("data", [("DET", [1.0, 2.0]), ("HET", [])]), ("", [("HET-XL", [1.5])])]
    text = plot_dots({"test NLL": groups, "precision@1": groups}, tmp_path / "made" / "dots.svg").read_text()
    for label in ("data", "DET", "HET", "HET-XL", "test NLL", "precision@1"):
        assert f"<!-- {label} -->" in text


def test_lines_with_levels_and_gaps(tmp_path):
    panels = {
        "NLL": {"DET": [(1.0, [2.0, 2.1]), (10.0, []), (100.0, [1.0, 1.1])], "none": [(1.0, [])]},
        "ms": {"DET": [(1.0, [3.0]), (100.0, [30.0])]},
    }
    path = tmp_path / "lines.svg"
    text = plot_lines(panels, path, "samples", log_x=True, log_y=("ms",), levels={"NLL": {"shared": 1.5}}).read_text()
    for label in ("DET", "shared", "NLL", "ms", "samples"):
        assert f"<!-- {label} -->" in text


def test_the_same_numbers_give_the_same_file(tmp_path):
    panels = {"ms": {"DET": [(1.0, [3.0, 4.0]), (2.0, [5.0, 6.0])]}}
    first, second = (plot_lines(panels, tmp_path / name / "a.svg", "samples").read_bytes() for name in ("x", "y"))
    assert first == second


def test_a_head_has_one_colour_and_places_their_own_numbers(tmp_path):
    points = [(1.0, [3.0]), (4.0, [4.0]), (1000.0, [5.0])]
    labels = ("HET", "HET, the paper's", "HET-XL", "HET-XL, the paper's")
    text = plot_lines({"ms": dict.fromkeys(labels, points)}, tmp_path / "a.svg", "samples", log_x=True).read_text()
    for place in ("1", "4", "1,000"):
        assert f"<!-- {place} -->" in text
    lines = re.findall(r'<path d="M [^"]*" clip-path="[^"]*" style="([^"]*)"', text)
    drawn = [line for line in lines if "stroke-width: 1.5" in line]
    colours = [re.search(r"stroke: (#\w+)", line)[1] for line in drawn]
    assert len(drawn) == 4
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert ["stroke-dasharray" in line for line in drawn] == [False, True, False, True]
