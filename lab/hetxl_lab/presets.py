"""Options of comparisons on the benchmark datasets: presets that take minutes on two cores, and the options of the
published pages of the studies."""

from pathlib import Path
from typing import Any

from hetxl._files import read_json
from hetxl_train.presets import PYCODE

_FILE: dict[str, dict[str, Any]] = read_json(Path(__file__).with_name("presets.json"))

WORDS = PYCODE | _FILE["words"]
GLYPHS = _FILE["glyphs"]
ICONS = GLYPHS | _FILE["icons"]
WORDNET = _FILE["wordnet"]
PUBLISHED = _FILE["published"]
"""Fixed here, so that new defaults of `hetxl train` change no published number."""
