"""The progress bar: on a terminal's standard error only."""

import pytest

from hetxl.data.progress import counted, progress_bar


def test_is_silent_where_standard_error_is_no_terminal(capsys):
    with progress_bar("Reading [x]", 10) as advance:
        advance(4)
        advance(6)
    assert capsys.readouterr() == ("", "")


def test_shows_the_description_as_it_is_on_a_terminal(capsys, monkeypatch):
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


def test_closed_the_bar_is_gone(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    items = counted(range(10_000), "Reading")
    assert next(items) == 0
    items.close()
    assert "Reading" in capsys.readouterr().err
    with progress_bar("Another", 1) as advance:
        advance(1)
    assert "Reading" not in capsys.readouterr().err


def test_errors_pass_through():
    with pytest.raises(KeyError, match="inside"), progress_bar("Reading", 1):
        raise KeyError("inside")
