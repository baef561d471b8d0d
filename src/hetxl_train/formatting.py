"""Format numbers for people; a dash stands for an unknown value."""

import sys

MISSING = "–"
MINUS = "−"
LARGEST = 1e100  # the largest magnitude accepted from a file: beyond it, sums and ratios could overflow


def finite(value: object) -> float | None:
    """Return a number as a float, and None for anything else: NaN, infinity, text, booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON allows integers of any length
        return None
    return number if abs(number) <= LARGEST else None  # false for not-a-number


def decimal(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """Format a number with fixed decimals, grouped thousands and a true minus sign."""
    if value is None:
        return MISSING
    text = f"{value:{'+' if sign else ''},.{digits}f}"
    if not any(character in "123456789" for character in text):
        text = text.lstrip("+-")  # no signed zero
    return text.replace("-", MINUS)


def with_error(value: float | None, error: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """Format a mean and its standard error as 4.213 ± 0.011, or the mean alone without an error."""
    text = decimal(value, digits, sign=sign)
    return text if value is None or error is None else f"{text} ± {decimal(error, digits)}"


def percent(share: float | None, digits: int = 1) -> str:
    """Format a fraction in percent."""
    return MISSING if share is None else f"{decimal(100 * share, digits)}%"


def count(value: float | None) -> str:
    """Format a whole number with all its digits."""
    return MISSING if value is None else decimal(round(value), 0)


def short_count(value: float | None) -> str:
    """Format a count, such as parameters: all digits below a million, then millions or billions."""
    if value is None:
        return MISSING
    if abs(value) < 1e6:
        return count(value)
    return f"{decimal(value / 1e6, 2)}M" if abs(value) < 1e9 else f"{decimal(value / 1e9, 2)}B"


def duration(seconds: float | None) -> str:
    """Format a measured time, from microseconds to hours."""
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


def rough_duration(seconds: float) -> str:
    """Format an estimated time: whole seconds or minutes, or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def amount(count: float) -> str:
    """Format a number of bytes as MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def probability(p: float | None) -> str:
    """Format a p-value with three decimals; smaller ones as < 0.001."""
    if p is None:
        return MISSING
    return "< 0.001" if p < 0.001 else decimal(p, 3)


def plural(number: int, noun: str) -> str:
    """Format a number and its noun: 1 seed, 3 seeds."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(words: list[str]) -> str:
    """Join words as in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def tick(value: float) -> str:
    """Format a value at an axis, short: 0.25, 40, 20k, 1.5M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}".replace("-", MINUS)
    if value and abs(value) < 1e-4:
        return f"{value:.3g}".replace("-", MINUS)
    return f"{value:,.6g}".replace("-", MINUS)


def message_lines(text: str) -> list[str]:
    """Return the lines of a message, each safe to print; a name on the command line never breaks one."""
    for word in sys.argv:
        if not word.isprintable():
            text = text.replace(word, printable(word))
    return [printable(line) for line in text.split("\n")]


def printable(text: str) -> str:
    """Return a name or path that is safe in a message: one line, no control characters, no undecodable bytes."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode("ascii")
        for letter in text
    )
