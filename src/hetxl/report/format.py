"""Numbers for people. What is not known is a dash."""

MISSING = "–"
MINUS = "−"
LARGEST = 1e100
"""Nothing that is measured is larger; beyond it, sums and ratios could overflow."""


def finite(value: object) -> float | None:
    """A number as a float; None for anything else, not-a-number, infinity and the like included.

    Args:
        value: as it was read from JSON.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON allows integers of any length
        return None
    return number if abs(number) <= LARGEST else None  # false for not-a-number


def decimal(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """A number with a fixed number of decimals, thousands grouped and a true minus.

    Args:
        value: the number.
        digits: decimals.
        sign: whether a plus is written.
    """
    if value is None:
        return MISSING
    text = f"{value:{'+' if sign else ''},.{digits}f}"
    if not any(character in "123456789" for character in text):
        text = text.lstrip("+-")  # no signed zero
    return text.replace("-", MINUS)


def with_error(value: float | None, error: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """A mean and its standard error: 4.213 ± 0.011; the mean alone when there is no error."""
    text = decimal(value, digits, sign=sign)
    return text if value is None or error is None else f"{text} ± {decimal(error, digits)}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent."""
    return MISSING if share is None else f"{decimal(100 * share, digits)}%"


def count(value: float | None) -> str:
    """A whole number with all its digits."""
    return MISSING if value is None else decimal(round(value), 0)


def short_count(value: float | None) -> str:
    """A number of parameters: all digits below a million, then millions or billions."""
    if value is None:
        return MISSING
    if abs(value) < 1e6:
        return count(value)
    return f"{decimal(value / 1e6, 2)}M" if abs(value) < 1e9 else f"{decimal(value / 1e9, 2)}B"


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it."""
    if seconds is None:
        return MISSING
    if seconds < 0.001:
        return f"{decimal(seconds * 1e6, 0)} µs"
    if seconds < 1:
        return f"{decimal(seconds * 1e3, 1 if seconds < 0.1 else 0)} ms"
    if seconds < 120:
        return f"{decimal(seconds, 2 if seconds < 10 else 1)} s"
    if seconds < 7200:
        return f"{decimal(seconds / 60, 1)} min"
    return f"{decimal(seconds / 3600, 1)} h"


def probability(p: float | None) -> str:
    """The p-value of a test: three decimals, and no claim below them."""
    if p is None:
        return MISSING
    return "< 0.001" if p < 0.001 else decimal(p, 3)


def plural(number: int, noun: str) -> str:
    """A number and its noun: 1 seed, 3 seeds."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(words: list[str]) -> str:
    """Words as a list in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def tick(value: float) -> str:
    """A value at an axis, short: 0.25, 40, 20k, 1.5M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}".replace("-", MINUS)
    if value and abs(value) < 1e-4:
        return f"{value:.3g}".replace("-", MINUS)
    return f"{value:,.6g}".replace("-", MINUS)
