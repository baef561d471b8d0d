"""Sentences made of numbers: by how much two rows differ, and whether what the paper concludes is what is found."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetxl.report.format import decimal
from hetxl.report.statistics import PairedTest, paired_test
from hetxl.studies.plot import half_width

LEVEL = 0.05
"""A difference counts below this p-value."""

MARGIN = 0.01
"""Differences below this share of the NLL are called none."""

Values = Mapping[str, Any]
"""What `hetxl.studies.runs.over_seeds` gives."""


def against(first: Values | None, second: Values | None, metric: str = "nll") -> PairedTest | None:
    """A metric of one row less that of another, paired over the seeds; None where a loss was not finite."""
    if first is None or second is None:
        return None
    return paired_test(first[metric], second[metric])


def sign(test: PairedTest | None) -> int | None:
    """−1 or 1 for a difference that counts, 0 for one that does not; None where there is nothing to test."""
    if test is None or test.p is None:
        return None
    if test.p >= LEVEL:
        return 0
    return -1 if test.difference < 0 else 1


def change(test: PairedTest | None, digits: int = 3, factor: float = 1.0, unit: str = "") -> str:
    """A difference in words: "lower by 0.012 ± 0.003 (p = 0.021)".

    Args:
        test: of the difference.
        digits: decimals.
        factor: by which it is multiplied.
        unit: behind it.
    """
    if test is None:
        return "not known, as a loss did not stay finite"
    size = factor * abs(test.difference)
    if round(size, digits) == 0:
        return "the same"
    word = "lower" if test.difference < 0 else "higher"
    error = "" if test.error is None else f" ± {decimal(factor * test.error, digits)}"
    level = "" if test.p is None else f" (p = {test.p:.3f})" if test.p >= 0.001 else " (p < 0.001)"
    return f"{word} by {decimal(size, digits)}{error}{unit}{level}"


def lower_in(tests: Iterable[PairedTest | None]) -> tuple[int, int, int]:
    """In how many comparisons a difference is below zero, significantly below, and significantly above."""
    known = [test for test in tests if test is not None]
    signs = [sign(test) for test in known]
    return sum(test.difference < 0 for test in known), signs.count(-1), signs.count(1)


def holds(found: bool | None, claim: str, why: str = "") -> str:
    """Whether a conclusion of the paper holds.

    Args:
        found: whether the numbers say so; None where they do not decide.
        claim: the conclusion, to follow "that".
        why: the reason, to follow a colon; empty for none.
    """
    reason = f": {why}" if why else ""
    if found is None:
        return f"The numbers here do not decide whether the paper's conclusion holds, that {claim}{reason}."
    return f"The paper's conclusion, that {claim}, {'holds' if found else 'does not hold'} here{reason}."


def within() -> str:
    """The margin, as the reason of a conclusion."""
    return f"a difference counts from {MARGIN:.0%} of the NLL on"


def agree(signs: Sequence[int | None], wanted: int) -> bool | None:
    """Whether differences lie on the wanted side: all that count do, and at least one counts.

    Args:
        signs: see `sign`.
        wanted: −1 for lower, 1 for higher.

    Returns:
        True if so, False if one counts on the other side, None if none counts.
    """
    if -wanted in signs:
        return False
    return True if wanted in signs else None


def insensitive(tests: Sequence[PairedTest | None], reference: Values | None) -> bool | None:
    """Whether nothing makes a difference worth the name.

    Args:
        tests: differences of the NLL to a reference.
        reference: what they are to.

    Returns:
        True if none is larger than `MARGIN` of the reference's NLL, False if one is, significantly; else None.
    """
    if reference is None or not tests or None in tests:
        return None
    limit = MARGIN * abs(sum(reference["nll"]) / len(reference["nll"]))
    large = [test for test in tests if test is not None and abs(test.difference) > limit]
    if not large:
        return True
    return False if any(sign(test) not in (0, None) for test in large) else None


def same(tests: Sequence[PairedTest | None], margin: float) -> bool | None:
    """Whether differences are none worth the name.

    Args:
        tests: of the differences.
        margin: that they may have, in the units of the metric.

    Returns:
        True if the 95 % intervals of all lie within the margin, False if one counts and is larger than it; else None.
    """
    known = [test for test in tests if test is not None]
    if any(abs(test.difference) > margin and sign(test) in (-1, 1) for test in known):
        return False
    if not known or len(known) < len(tests) or any(test.error is None for test in known):
        return None
    return True if all(abs(test.difference) + half_width(test) <= margin for test in known) else None
