"""What the README and docs/ say is so: ```python blocks run, commands and options exist, names and paths resolve."""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from hetxl._files import read_json
from hetxl_lab.studies.registry import ENTRIES, load_study
from hetxl_lab.studies.run import index
from hetxl_lab.studies.run import page as page_of
from hetxl_train.cli.commands import LazyCommand, app

ROOT = Path(__file__).parents[2]
LAB = ROOT / "lab" / "docs"
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(LAB.rglob("*.md")))
}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page, text in PAGES.items() if BLOCK.search(text)]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMAND_LINE = re.compile(r"^(?:\$ )?hetxl (.*)$", re.MULTILINE)
INLINE = re.compile(r"`hetxl ([^`]+)`")
PAPER = "docs/paper.md"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", WITH_CODE)
def test_code_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # some write files
    text = PAGES[page]
    namespace: dict[str, object] = {"__name__": Path(page).stem}
    for block in BLOCK.finditer(text):
        # Blank lines in front, so that a traceback names the line of the page.
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(ROOT / page), "exec"), namespace)


def test_pages_with_code_are_found():
    names = ("README.md", "docs/start.md", "docs/heads.md", "docs/training.md", "docs/guides/noisy-labels.md")
    assert set(names) <= set(WITH_CODE)


def wrong_words(line: str) -> list[str]:
    """The commands and options of a line that `hetxl` does not have; a COMMAND that stands for any is left out."""
    command: Any = get_command(app)
    words = shlex.split(line, comments=True)
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name = words.pop(0)
        if name.isupper() or name == "…":
            return []
        default = getattr(command, "default", None)
        if name not in command.commands and default is None:
            return [name]
        command = command.commands.get(name) or command.commands[default]
        command = command.load() if isinstance(command, LazyCommand) else command
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    return [word for word in words if word.startswith("--") and word.split("=")[0] not in options]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str):
    text = PAGES[page]
    lines = [line for fence in FENCE.findall(text) for line in COMMAND_LINE.findall(fence)]
    lines += [" ".join(line.split()) for line in INLINE.findall(FENCE.sub("", text))]
    assert {line: wrong for line in lines if (wrong := wrong_words(line))} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("train data.npz --head het-xl --no-frozen  # --nothing", []),
        ("train data.npz --heads het-xl", ["--heads"]),
        ("study flops --quick", []),
        ("study nothing", ["nothing"]),
        ("COMMAND --whatever", []),
    ],
)
def test_wrong_words_are_found(line: str, wrong: list[str]):
    assert wrong_words(line) == wrong


def resolve(name: str) -> object:
    """The object of a dotted name: the longest part that is a module, and attributes of it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            target = getattr(target, part)
        return target
    raise ModuleNotFoundError(name)


def test_names_of_the_paper_page_resolve():
    names = set(re.findall(r"`[^`]*?\b(hetxl(?:\.\w+)+)", PAGES[PAPER]))
    assert len(names) > 40
    for name in sorted(names):
        assert resolve(name) is not None
    with pytest.raises(AttributeError):
        resolve("hetxl.nn.NoHead")


def test_paths_of_the_paper_page_exist():
    paths = re.findall(r"`(\w[\w/.-]*/[\w.-]+\.\w+)`", PAGES[PAPER])
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_study_of_the_paper_is_on_its_page():
    assert [name for name in ENTRIES if f"`hetxl study {name}`" not in PAGES[PAPER]] == []


STUDIES = LAB / "studies"


@pytest.mark.parametrize("name", ENTRIES)
def test_study_page_matches_its_numbers(name: str):
    study, summary = load_study(name), read_json(STUDIES / f"{name}.json")
    assert summary["form"] == "full"
    assert (STUDIES / f"{name}.md").read_text() == page_of(study, summary)
    assert (STUDIES / f"{name}.svg").exists()


def test_every_study_has_a_page():
    assert [name for name in ENTRIES if not (STUDIES / f"{name}.md").exists()] == []
    assert (STUDIES / "index.md").read_text() == index(STUDIES)
