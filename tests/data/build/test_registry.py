"""The datasets that can be built, by name."""

import inspect

import pytest

from hetxl.data.build.registry import BUILDERS, command, defaults, text
from hetxl.data.open import BUILT_IN


@pytest.mark.parametrize("name", BUILDERS)
def test_the_functions_are_there(name):
    builder = BUILDERS[name]
    for function in (builder.builder(), builder.loader()):
        parameters = inspect.signature(function).parameters.values()
        assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
        assert defaults(function)["cache"] is None
    # What changes the files changes the data.
    assert defaults(builder.builder()).items() <= defaults(builder.loader()).items()
    assert BUILT_IN[name] == (builder.module, builder.load)
    assert builder.description
    assert "\n" not in builder.description


def test_the_command():
    assert command("words", {}) == "hetxl data build words"
    assert command("words", {"entries": 50}) == "hetxl data build words:entries=50"
    assert command("toy", {"entries": 50, "big": False}) == "hetxl data build toy:entries=50,big=false"


def test_options_that_are_the_defaults_are_left_out():
    usual = defaults(BUILDERS["words"].builder())
    assert command("words", usual) == "hetxl data build words"


def test_values_as_they_are_typed():
    assert [text(value) for value in (True, False, 3, 0.5, "a")] == ["true", "false", "3", "0.5", "a"]
