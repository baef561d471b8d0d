"""Plain technical English everywhere a person reads: phrases and words that have a better form may not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".md", ".html", ".js", ".toml")
TREES = ("src", "lab", "tests", "docs", "examples", "benchmarks", "scripts", "README.md", "CHANGELOG.md",
         "CONTRIBUTING.md", "SECURITY.md")  # fmt: skip

# What is not written, and what to write instead.
BANNED = {
    r"\bnobody (says|asks|knows|waits|reads|gives|could)\b": "by default, or who is meant",
    r"for as much time": "in equal time",
    r"where there (is|are) none": "otherwise, or if missing",
    r"\bis no (run|number|file|folder|directory|built)": "is not a …",
    r"\bis not there\b": "is not available, or does not exist",
    r"\bso many (rows|steps|samples|classes|names|parts|examples|of)\b": "that many, or the number of",
    r"\b(is|are) told\b": "prints, or reports",
    r"\bfor ever\b": "without end",
    r"\btrainings\b": "runs",
    r"\b(goes|go) on (with|from|where|after)\b": "continues, or resumes",
    r"\bpictures?\b": "image",
    r"\btied? together\b|\bties together\b": "are confused with each other",
    r"\bis let be\b": "is left alone",
    r"\bwhat answers\b": "the classifier",
    r"\bdeaf to\b": "ignores",
    r"\bwould do nothing\b": "without effect",
    r"\btell which serves\b": "report which performs best",
    r"passes? over the data\b": "epochs",
    r"\bwhose every (call|one|part)\b": "each … of which",
    r"\bin the place of\b": "instead of, or replaces",
    r"\b[Aa]s of `": "see `…`, or that of `…`",
    r"\bsigns? of life\b": "response",
    r"\banew\b": "again",
    r"\bplays? no part\b": "is ignored",
    r"\ba whole program\b": "a complete program",
    r"\bto the last digit\b": "exactly",
    r"\b(any|all) class(es)? alike\b": "uniformly random",
    r"\b(the|least|as) sure(st)?\b": "certain",
    r"\bwhole or not at all\b": "atomically",
    r"\bif need be\b": "if missing, or if needed",
    r"\b(labels?|one) a row\b": "per row",
    r"\bfrom nothing\b": "from scratch",
    r"\bleft as it is\b": "does not change",
    r"\bwith (commas|\|) between\b": "separated by commas",
    r"\bknows? nothing of\b": "does not use, or has no",
    r"\bfor as long as\b": "as long as, or in equal time",
    r"\bwith it comes?\b": "imports, or includes",
    r"\bof no account\b": "does not matter",
    r"\bis believed\b": "is accepted",
    r"\bnone of which\b": "and none of them",
    r"\bso that there is\b": "so that … has",
    r"\bin (its|their) places?\b": "in place, or instead",
    r"\bhow sure\b": "how certain",
    r"\btakes? no notice\b": "ignores",
    r"\bthat (it|they) (is|are) told\b": "that it gets",
}
# Names that stay: arrays of built datasets on users' disks, keys of results, and an old option that still works.
KEPT = re.compile(r"pictures\.npy|\"pictures\"|[\"']trainings[\"']|\"--trainings\"|\btrainings(: int|\}|,$)")


def lines_to_check() -> list[tuple[str, str]]:
    """All lines that a person reads, with where they are."""
    files = [
        path
        for tree in TREES
        for path in ([ROOT / tree] if (ROOT / tree).is_file() else sorted((ROOT / tree).rglob("*")))
        if path.suffix in SUFFIXES and path != Path(__file__)
    ]
    return [
        (f"{path.relative_to(ROOT)}:{number}", KEPT.sub("", line))
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    return lines_to_check()


@pytest.mark.parametrize("phrase", BANNED)
def test_phrase_has_its_better_form(phrase: str, lines: list[tuple[str, str]]):
    pattern = re.compile(phrase, re.IGNORECASE)
    assert [f"{where}: write {BANNED[phrase]}" for where, line in lines if pattern.search(line)] == []


def test_banned_phrases_are_found():
    sentences = ("{dir} is no run: it has no config.json", "where nobody says how long", "DET for as much time")
    for sentence in sentences:
        assert any(re.search(phrase, sentence) for phrase in BANNED), sentence
