"""`hetxl study model-scale`: do the gains stay when the model is twice as wide (Table "Effect of model scaling")?"""

from collections.abc import Sequence

from hetxl.studies.forms import LEARNED, Form
from hetxl.studies.lines import NLL, PARAMETERS, PRECISION, Line, LineStudy, values_of
from hetxl.studies.study import Summary
from hetxl.studies.verdicts import against, agree, change, holds, sign
from hetxl.training.config import TrainConfig

HEADS = {"DET": ("det", {}), "HET-XL": ("het-xl", LEARNED)}
WIDTH, FEATURES = 512, 128
"""Of the network for tokens, unless told."""


def widened(config: TrainConfig, factor: int) -> dict[str, int]:
    """The options of a network that is wider, in its hidden layers and its features."""
    return {
        "width": factor * (config.width or WIDTH),
        "features": factor * (config.features or FEATURES),
    }


class ModelScale(LineStudy):
    """Once and twice the width."""

    name = "model-scale"
    question = "Do the gains of HET-XL stay when the backbone is twice as wide, features included?"
    paper = ("tab:model_scale_ablation",)
    claim = "both methods benefit from a wider model, and HET-XL stays ahead of DET by about as much"
    title = "Effect of twice the width"
    columns = (NLL, PRECISION, PARAMETERS)

    def lines(self, form: Form) -> Sequence[Line]:
        """Both heads at both widths."""
        lines = []
        for factor in (1, 2):
            for label, (head, options) in HEADS.items():
                more = widened(form.base.config(head), factor) if factor > 1 else {}
                lines.append(Line(label, head, form.base, {**options, **more}, f"{factor}× width"))
        return lines

    def conclusion(self, summary: Summary) -> str:
        """HET-XL against DET at both widths, and the gain of each."""
        tests = [
            against(values_of(summary, "HET-XL", group), values_of(summary, "DET", group))
            for group in ("1× width", "2× width")
        ]
        gains = [
            against(values_of(summary, label, "2× width"), values_of(summary, label, "1× width")) for label in HEADS
        ]
        texts = [
            f"{label}'s NLL is {change(gain)} at twice the width" for label, gain in zip(HEADS, gains, strict=True)
        ]
        found = agree([sign(test) for test in tests], -1)
        return (
            f"HET-XL's NLL compared with DET's is {change(tests[0])} at the usual width and {change(tests[1])} at "
            "twice "
            f"that. {'; '.join(texts)}. {holds(found, 'HET-XL stays ahead of DET in a wider model')}"
        )


STUDY = ModelScale()
