"""`hetxl study residual`: rank-1 or diagonal beside the factors (Table "Diagonal component parameterization")?"""

from collections.abc import Sequence

from hetxl.studies.forms import FIXED, LEARNED, Form
from hetxl.studies.lines import NLL, PRECISION, Line, LineStudy, values_of
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
    columns = (NLL, PRECISION)

    def lines(self, form: Form) -> Sequence[Line]:
        """Four combinations."""
        return [
            Line(f"{kind}, {tau}", "het-xl", form.base, {**options, "residual": residual})
            for tau, options in TAUS.items()
            for kind, residual in KINDS.items()
        ]

    def conclusion(self, summary: Summary) -> str:
        """Diagonal against rank-1."""
        tests = {
            tau: against(values_of(summary, f"diagonal, {tau}"), values_of(summary, f"rank-1, {tau}")) for tau in TAUS
        }
        texts = [f"{change(test)} with {tau}" for tau, test in tests.items()]
        found = insensitive(list(tests.values()), values_of(summary, "rank-1, learned τ"))
        return (
            f"The NLL with a diagonal component, compared with the rank-1 one, is {' and '.join(texts)}. "
            f"{holds(found, self.claim, within())}"
        )


STUDY = Residual()
