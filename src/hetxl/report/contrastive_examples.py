"""Pictures in the report of contrastive runs: those never seen with the names they got, and pairs by their noise."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hetxl.report import format as form
from hetxl.report.groups import Group
from hetxl.report.markup import Markup, join, tag
from hetxl.report.read import Run
from hetxl.report.sections import left_out

KINDS = (("noisiest", "Most noise"), ("calmest", "Least noise"))
_PICTURE = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+=*")


def named_pictures(groups: Sequence[Group]) -> list[Markup]:
    """Test pictures with the three most probable names, of the first run of each group that has them.

    Args:
        groups: of runs.
    """
    blocks = []
    for label, run in _first(groups, "zero_shot"):
        found = _entries(run, "zero_shot")
        right = sum(entry.get("hit") is True for entry in found)
        lead = tag("p", f"{right} of these {len(found)} are right; drawn at random.", class_="note")
        blocks.append((label, join([lead, tag("div", *(_card(entry) for entry in found), class_="cards")])))
    if not blocks:
        return [left_out("Pictures", "no run has some in examples.json")]
    (name, first), rest = blocks[0], blocks[1:]
    folded = [tag("details", tag("summary", f"The same by {other}"), block) for other, block in rest]
    return [tag("h3", name), first, *folded]


def noisy_pairs(groups: Sequence[Group]) -> list[Markup]:
    """The training pairs that the model finds noisiest, and the least noisy ones.

    Args:
        groups: of runs.
    """
    found = []
    for label, run in _first(groups, "noisiest"):
        for kind, title in KINDS:
            cards = tag("div", *(_card(entry) for entry in _entries(run, kind)), class_="cards")
            found.append(join([tag("h4", f"{title}, {label}"), cards]))
    return found or [left_out("Noise of pairs", "no run has noise on its embeddings")]


def _first(groups: Sequence[Group], kind: str) -> list[tuple[str, Run]]:
    """Of each label the first run that has entries; heads with noise before DET."""
    found = []
    for group in sorted(groups, key=lambda group: group.label == "DET"):
        run = next((run for run in group.runs if _entries(run, kind)), None)
        if run is not None:
            found.append((group.label if run.seed is None else f"{group.label}, seed {run.seed}", run))
    return found


def _entries(run: Run, kind: str) -> list[dict[str, Any]]:
    found = run.examples.get(kind)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _card(entry: Mapping[str, Any]) -> Markup:
    """One pair: the picture, its text, and what the model says."""
    label, image, path = str(entry.get("label", "")), entry.get("image"), entry.get("path")
    parts = []
    if isinstance(image, str) and _PICTURE.fullmatch(image):
        parts.append(tag("img", src=image, alt=label))
    if isinstance(path, str) and path:
        parts.append(tag("p", path, class_="path"))
    mark = None
    if isinstance(entry.get("hit"), bool):
        mark = tag("span", "right" if entry["hit"] else "wrong", class_="right" if entry["hit"] else "wrong")
    elif isinstance(entry.get("swapped"), bool) and entry["swapped"]:
        mark = tag("span", "swapped", class_="wrong")
    parts.append(tag("p", tag("b", label or form.MISSING), " ", mark, class_="label"))
    top = entry.get("top")
    if isinstance(top, list):
        parts.append(tag("ul", *filter(None, (_bar(one) for one in top[:3])), class_="top"))
    if entry.get("unseen") is True:
        parts.append(tag("p", "a name that no training pair has", class_="note"))
    noise = form.finite(entry.get("noise"))
    if noise is not None:
        parts.append(tag("p", f"noise {form.decimal(noise, 4)}", class_="note"))
    return tag("div", *parts, class_="card")


def _bar(entry: Any) -> Markup | None:
    if not isinstance(entry, list) or len(entry) != 2 or (share := form.finite(entry[1])) is None:
        return None
    name = tag("span", str(entry[0]), class_="name", title=str(entry[0]))
    bar = tag("span", style=f"width:{100 * min(max(share, 0), 1):.1f}%", class_="share")
    return tag("li", bar, name, tag("span", form.percent(share), class_="number"))
