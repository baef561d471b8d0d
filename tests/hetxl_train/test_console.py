"""What a person sees, and where."""

import io

import pytest
from rich.console import Console as RichConsole

from hetxl_train.console import Bar, Console, counted, progress_bar
from hetxl_train.formatting import message_lines


def test_lines_go_to_the_standard_error_as_they_are(capsys):
    Console().say("[bold]not markup[/bold] " + 60 * "long ")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "[bold]not markup[/bold] " + 60 * "long " + "\n"


def test_quiet_console_prints_nothing(capsys):
    console = Console(quiet=True)
    console.say("nothing")
    with console.bar("bar", 10) as bar:
        bar.to(5, "half")
    assert capsys.readouterr() == ("", "")


def test_no_bar_without_a_terminal(capsys):
    with Console().bar("bar", 10) as bar:
        bar.to(10)
    assert capsys.readouterr() == ("", "")


def test_bar_shows_title_and_status_on_a_terminal():
    screen = io.StringIO()
    console = RichConsole(file=screen, force_terminal=True, width=100)
    with Bar(console, "HET-XL", 10, 2) as bar:
        bar.to(5, "loss 1.25")
        bar.refresh()
    shown = screen.getvalue()
    assert "HET-XL" in shown
    assert "50%" in shown
    assert "loss 1.25" in shown


def test_progress_bar_is_silent_without_a_terminal(capsys):
    with progress_bar("Reading [x]", 10) as advance:
        advance(4)
        advance(6)
    assert capsys.readouterr() == ("", "")


def test_progress_bar_does_not_interpret_markup(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with progress_bar("Reading [red]x", 10) as advance:
        advance(10)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Reading [red]x" in err
    assert "100%" in err


def test_counting_gives_the_items_as_they_are(capsys):
    assert list(counted(iter(range(10_000)), "Reading")) == list(range(10_000))
    assert list(counted([], "Reading")) == []
    assert capsys.readouterr() == ("", "")


def test_closing_the_iterator_removes_the_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    items = counted(range(10_000), "Reading")
    assert next(items) == 0
    items.close()
    assert "Reading" in capsys.readouterr().err
    with progress_bar("Another", 1) as advance:
        advance(1)
    assert "Reading" not in capsys.readouterr().err


def test_progress_bar_passes_errors_through():
    with pytest.raises(KeyError, match="inside"), progress_bar("Reading", 1):
        raise KeyError("inside")


def test_names_on_the_command_line_never_break_a_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["hetxl", "data", "x\x1b[31my\nz.npz"])
    assert message_lines("x\x1b[31my\nz.npz is damaged\nsecond") == [r"x\x1b[31my\nz.npz is damaged", "second"]
