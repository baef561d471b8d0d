"""Write audit.html: the most suspicious labels as cards, to keep or correct by click or key."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetxl_train import formatting as form
from hetxl_train.data.dataset import Shown, Split
from hetxl_train.examples import image_of
from hetxl_train.report.html import created_at, write_page
from hetxl_train.report.render import read_script, render
from hetxl_train.report.tables import as_html, text_table

SHOWN = 1000
"""Maximum number of suspect labels on the page; audit.csv has all."""
TEXT = 600  # longer texts are cut
RATES = ("labels", "suspects", "share")


def write_audit_page(suspects: Iterable[Mapping[str, Any]], about: Mapping[str, Any], split: Split, path: Path) -> Path:
    """Write the page of an audit atomically, and return its path.

    Args:
        suspects: rows of audit.csv; the page shows the first `SHOWN`.
        about: content of audit.json.
        split: rows of the data.
    """
    entries = [_card(entry, split.show(entry["row"])) for entry in itertools.islice(suspects, SHOWN)]
    share = about["suspects"] / max(1, about["audited"])
    pairs = [(pair["label"], pair["suggestion"], *_rates(pair)) for pair in about["pairs"]]
    classes = [(entry["class"], *_rates(entry)) for entry in about["classes"]]
    text = render(
        "audit.html",
        title=f"Audit of {form.count(about['audited'])} labels",
        facts=[f"{form.count(about['suspects'])} suspects ({form.percent(share)})", created_at(None)],
        entries=entries,
        **read_script("audit.js"),
        ident=hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16],
        pairs=as_html(text_table("Pairs", ("label", "suggestion", *RATES), pairs)) if pairs else None,
        classes=as_html(text_table("Classes", ("class", *RATES), classes)) if classes else None,
    )
    return write_page(path, text)


def _rates(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the number of labels of a class, the number of suspect ones, and their share."""
    return form.count(entry["labels"]), form.count(entry["suspects"]), form.percent(entry["suspects"] / entry["labels"])


def _card(entry: Mapping[str, Any], shown: Shown) -> dict[str, Any]:
    """Return the content of a suspect's card."""
    own = {key: entry[key] for key in ("row", "label", "suggestion", "reason")}
    return own | {"image": image_of(shown), "text": shown.text and shown.text[:TEXT]}
