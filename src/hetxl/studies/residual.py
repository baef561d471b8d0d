"""`hetxl study residual`: rank-1 or diagonal beside the factors (Table "Diagonal component parameterization")?"""

from collections.abc import Sequence

from hetxl.studies.forms import FIXED, LEARNED, Form
from hetxl.studies.lines import NLL, PRECISION, SECONDS, Line, LineStudy, values_of
from hetxl.studies.study import Summary
from hetxl.studies.verdicts import against, change, holds, insensitive, within

KINDS = {"rank-1": "rank1", "diagonal": "diagonal"}
TAUS = {"learned τ": LEARNED, "τ not learned": FIXED}


class Residual(LineStudy):
    """Both residuals with τ learned and not."""

    name = "residual"
    question = "Beside its factors a covariance has d(x) d(x)ᵀ, or diag(d(x)²): does it matter which?"
    paper = ("tab:diag_parameterization",)
    claim = "the choice has little effect on predictions, so the cheaper rank-1 component is taken"
    title = "The residual of the covariance"
    columns = (NLL, PRECISION, SECONDS)

    def lines(self, form: Form) -> Sequence[Line]:
        """Four combinations."""
        return [
            Line(f"{kind}, {tau}", "het-xl", form.base, {**options, "residual": residual})
            for tau, options in TAUS.items()
            for kind, residual in KINDS.items()
        ]

    def conclusion(self, summary: Summary) -> str:
        """Diagonal against rank-1, in predictions and time."""
        tests = {
            tau: against(values_of(summary, f"diagonal, {tau}"), values_of(summary, f"rank-1, {tau}")) for tau in TAUS
        }
        texts = [f"{change(test)} with {tau}" for tau, test in tests.items()]
        seconds = [
            sum(values["train_seconds"])
            for kind in KINDS
            for values in [values_of(summary, f"{kind}, learned τ")]
            if values is not None
        ]
        found = insensitive(list(tests.values()), values_of(summary, "rank-1, learned τ"))
        time = f" It takes {seconds[1] / seconds[0]:.2f} times as long to train." if len(seconds) == 2 else ""
        return (
            f"The NLL with a diagonal component, compared with the rank-1 one, is {' and '.join(texts)}.{time} "
            f"{holds(found, self.claim, within())}"
        )


STUDY = Residual()
