import pytest
import typer

from hetxl.cli.errors import one_line_errors


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("rank must be\n at least 1"), 2), (FileNotFoundError("no x"), 2), (FloatingPointError("nan"), 1)],
)
def test_bad_input_ends_with_a_message(error, code, capsys):
    with pytest.raises(typer.Exit) as found, one_line_errors():
        raise error
    assert found.value.exit_code == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("Error: ")


def test_bugs_are_not_hidden():
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("a bug")
