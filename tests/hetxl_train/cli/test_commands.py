"""The `hetxl` command as a whole: what it loads, its help, plug-ins, and how errors end it."""

import builtins
import os
import subprocess
import sys
import time
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
import typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import hetxl
from hetxl_train import plugins
from hetxl_train.cli import main
from hetxl_train.cli.commands import LazyCommand, app, one_line_errors
from hetxl_train.config import TrainConfig
from hetxl_train.console import Console


def call(*words):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, words, prog_name="hetxl")


def loaded_modules(*words):
    """The modules that a command line loads, in a process of its own."""
    code = (
        f"import sys; sys.argv = ['hetxl', *{words!r}]\n"
        "from hetxl_train.cli import main\n"
        "try: main()\n"
        "except SystemExit: print('modules:', *sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.split("modules:")[1].split()


@pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
def test_help_and_version_load_few_modules_and_no_torch(flag):
    modules = loaded_modules(flag)
    assert len([name for name in modules if name.split(".")[0].startswith("hetxl")]) < 60
    assert not {"torch", "numpy", "hetxl_lab"} & set(modules)


@pytest.mark.slow
def test_help_takes_at_most_half_a_second_more_than_typer_and_rich():
    def seconds(*arguments):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert seconds("-m", "hetxl_train.cli", "--help") <= seconds("-c", "import typer, rich") + 0.5


def test_version_is_printed():
    result = call("--version")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"hetxl {hetxl.__version__}\n", "")
    line = [sys.executable, "-m", "hetxl_train.cli", "--version"]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == result.stdout


def test_missing_typer_error_names_the_extra():
    code = "import sys; sys.modules['typer'] = None; from hetxl_train.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    line = "the hetxl command needs more packages: pip install 'hetxl[train]'\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


def test_no_arguments_show_the_help():
    assert call().output == call("--help").output


def commands(group, path=()):
    """All commands below a group, loaded, with their words."""
    for name, command in group.commands.items():
        loaded = command.load() if isinstance(command, LazyCommand) else command
        yield (*path, name), command, loaded
        if isinstance(loaded, TyperGroup):
            yield from commands(loaded, (*path, name))


def test_the_line_in_the_list_is_the_first_of_the_commands_own_help():
    for words, command, loaded in commands(get_command(app)):
        if isinstance(command, LazyCommand):
            assert command.short_help == loaded.help.split("\n\n")[0].replace("\n", " "), words


def test_help_by_either_name_for_every_command():
    for words, _, loaded in commands(get_command(app)):
        short, long = call(*words, "-h"), call(*words, "--help")
        assert short.exit_code == 0, words
        assert short.output == long.output
        assert loaded.help.split("\n")[0] in " ".join(long.output.split())


def test_options_are_listed_by_section():
    text = call("train", "--help").output
    titles = [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    sections = [f"{section.capitalize()} options" for section in dict.fromkeys(TrainConfig.sections().values())]
    assert titles == ["Arguments", "Options", *sections]
    assert text.index("Head options:") < text.index("--rank ") < text.index("Backbone options:")


def test_a_misspelt_command_has_a_suggestion():
    result = call("trian")
    assert result.exit_code == 2
    assert "train" in result.stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("train", "x.npz", "--lr", "1"), "--learning-rate"),
        (("predict", "run", "x.npy", "--k", "3"), "--top-k"),
        (("train", "x.npz", "--learnin-rate", "1"), "--learning-rate"),
    ],
)
def test_unknown_options_get_a_suggestion_that_fits(words, option):
    result = call(*words)
    assert result.exit_code == 2
    assert option in result.stderr.splitlines()[-1]


def test_completion_names_commands_and_options():
    for words, expected in (("hetxl tr", "train"), ("hetxl train --lear", "--learning-rate")):
        environment = {"_HETXL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        line = [sys.executable, "-c", "import sys; sys.argv = ['hetxl']; from hetxl_train.cli import main; main()"]
        result = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        assert expected in result.stdout.split()


def test_no_help_is_wider_than_100_columns():
    for words, _, _ in commands(get_command(app)):
        assert max(map(len, call(*words, "--help").output.splitlines())) <= 100, words


@pytest.fixture
def installed(monkeypatch):
    """Replace the installed plug-ins of a group."""

    def install(group, **targets):
        entries = {name: EntryPoint(name, target, f"hetxl.{group}") for name, target in targets.items()}
        usual = plugins.entries
        monkeypatch.setattr(plugins, "entries", lambda name: entries if name == group else usual(name))

    return install


@pytest.mark.parametrize("words", [("study",), ("study", "flops", "--quick"), ("data", "build"), ("study", "--help")])
def test_lab_commands_without_the_lab_name_the_package(installed, words):
    installed("commands")
    result = call(*words)
    assert result.exit_code == 2
    name = "data build" if words[0] == "data" else "study"
    assert result.stderr == f"Error: hetxl {name} {plugins.LAB}\n"


def test_commands_of_the_lab_are_listed_with_it_and_without(installed):
    with_lab = [call(*words).stdout for words in (("--help",), ("data", "--help"))]
    assert plugins.LAB_COMMANDS["study"] in with_lab[0]
    assert plugins.LAB_COMMANDS["data.build"] in with_lab[1]
    installed("commands")
    assert [call(*words).stdout for words in (("--help",), ("data", "--help"))] == with_lab


def test_other_packages_add_commands_that_are_imported_when_they_run(installed):
    installed("commands", greet="no_such_module:greet", shout="builtins:print")
    assert "Added by no_such_module:greet." in call("--help").stdout
    result = call("greet")
    assert result.exit_code == 2
    assert "no_such_module" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("rank must be\n at least 1"), 2), (FileNotFoundError("no x"), 2), (FloatingPointError("nan"), 1)],
)
def test_bad_input_ends_with_a_message(error, code, capsys):
    with pytest.raises(typer.Exit) as exit, one_line_errors():
        raise error
    assert exit.value.exit_code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Error: ")


def test_bugs_are_not_hidden():
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("a bug")


def test_main_runs_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hetxl", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"hetxl {hetxl.__version__}"


@pytest.mark.parametrize(("missing", "message"), [("typer", "pip install 'hetxl[train]'"), ("hetxl_train.x", None)])
def test_main_names_the_extra_that_is_missing(monkeypatch, capsys, missing, message):
    def fail(name, *rest):
        if name == "hetxl_train.cli.commands":
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return imported(name, *rest)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", fail)
    if message is None:  # of the app itself: not what an extra would mend
        with pytest.raises(ModuleNotFoundError):
            main()
        return
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_control_characters_are_escaped_on_the_terminal(capfd):
    Console().say("runs/x\x1b[31my")
    with pytest.raises(typer.Exit), one_line_errors():
        raise ValueError("x\x1b[31my is not a file")
    shown = capfd.readouterr().err
    assert "\x1b[31m" not in shown
    assert "runs/x\\x1b[31my" in shown
    assert "Error: x\\x1b[31my is not a file" in shown


@pytest.mark.parametrize("allocate", [lambda: np.zeros(4 * 10**15), lambda: torch.empty(10**16)])
def test_too_little_memory_is_one_line(capfd, allocate):
    with pytest.raises(typer.Exit), one_line_errors():
        allocate()
    shown = capfd.readouterr().err
    assert shown.startswith("Error: not enough memory (")
    assert shown.count("\n") == 1
