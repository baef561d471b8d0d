"""Train two towers on icons and their names, then name new icons of a new design with new names.

A share of the names is swapped, like wrong captions from the web. `python examples/contrastive_icons.py page.html`
keeps the page with the images; `hetxl contrastive train icons` is the same on all 24,000 icons.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from hetxl_lab.build.packages import Unavailable
from hetxl_lab.datasets.icons import build_icons
from hetxl_train.config import ContrastiveConfig
from hetxl_train.console import Console
from hetxl_train.report.contrastive import write_contrastive_report
from hetxl_train.training import train

EACH = 200
"""Icons of each of twelve fonts, so that it takes seconds."""


def main() -> None:
    """Build the icons, train, classify, and write the page."""
    torch.set_num_threads(1)
    try:
        build_icons(each=EACH)
    except Unavailable as reason:
        print(f"The icons cannot be had here: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            ContrastiveConfig(
                data=f"icons:each={EACH}", head="het-xl", swap=0.1, steps=70, batch_size=128, out=f"{folder}/run"
            ),
            console=Console(quiet=True),
        )
        result = json.loads((run.path / "result.json").read_text())
        zero_shot = result["metrics"]["test"]["zero_shot"]
        print(f"{zero_shot['classes']} names of a design never seen, {zero_shot['unseen_classes']} of them never seen:")
        print(
            f"zero-shot top-1 {zero_shot['top1']:.1%}, top-5 {zero_shot['top5']:.1%}; chance {zero_shot['chance']:.1%}"
        )
        for entry in json.loads((run.path / "examples.json").read_text())["zero_shot"][:8]:
            names = ", ".join(f"{name} {share:.0%}" for name, share in entry["top"])
            print(f"  {'+' if entry['hit'] else ' '} {entry['label']:<24} {names}")
        page = write_contrastive_report(run.path, sys.argv[1] if len(sys.argv) > 1 else run.path)
        print(f"The page has {page.stat().st_size // 1000} kB" + (f": {Path(page)}" if len(sys.argv) > 1 else ""))


if __name__ == "__main__":
    main()
