"""What a person sees, and where."""

import io

import pytest
from rich.console import Console

from hetxl.training.progress import Bar, Narrator, amount, duration


def test_lines_go_to_the_standard_error_as_they_are(capsys):
    Narrator().say("[bold]not markup[/bold] " + 60 * "long ")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "[bold]not markup[/bold] " + 60 * "long " + "\n"


def test_quiet(capsys):
    narrator = Narrator(quiet=True)
    narrator.say("nothing")
    with narrator.bar("bar", 10) as bar:
        bar.to(5, "half")
    assert capsys.readouterr() == ("", "")


def test_no_bar_without_a_terminal(capsys):
    with Narrator().bar("bar", 10) as bar:
        bar.to(10)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with Bar(console, "HET-XL", 10, 2) as bar:
        bar.to(5, "loss 1.25")
        bar._progress.refresh()
    shown = screen.getvalue()
    assert "HET-XL" in shown
    assert "50%" in shown
    assert "loss 1.25" in shown


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.2, "0 s"),
        (59.6, "60 s"),
        (90, "2 min"),
        (3600, "60 min"),
        (5399, "90 min"),
        (5400, "1.5 h"),
        (86400, "24.0 h"),
    ],
)
def test_duration(seconds, expected):
    assert duration(seconds) == expected


@pytest.mark.parametrize(("count", "expected"), [(0, "0 MB"), (1.6e6, "2 MB"), (999e6, "999 MB"), (1.04e9, "1.0 GB")])
def test_amount(count, expected):
    assert amount(count) == expected
