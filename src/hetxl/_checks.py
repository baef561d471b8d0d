"""Argument checks shared by the constructors. Each error names the argument, the value found and the allowed values."""

import contextlib
import difflib
import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar, cast

Name = TypeVar("Name", bound=str)


def one_of(name: str, value: object, allowed: Collection[Name]) -> Name:
    """Return `value` if it is one of the `allowed` names; otherwise raise, with a suggestion for a near miss."""
    for choice in allowed:
        if choice == value:
            return choice
    near = difflib.get_close_matches(str(value), list(allowed), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    choices = ", ".join(repr(choice) for choice in allowed)
    raise ValueError(f"{name} must be one of {choices}, found {value!r}{hint}")


def integer_at_least(name: str, value: object, minimum: int) -> int:
    """Return `value` as an int of at least `minimum`, or raise."""
    # bool is a subclass of int, but num_samples=True is a mistake.
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer of at least {minimum}, found {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, found {value}")
    return value


def integer_between(name: str, value: object, minimum: int, maximum: int) -> int:
    """Return `value` as an int from `minimum` to `maximum`, or raise."""
    if integer_at_least(name, value, minimum) > maximum:
        raise ValueError(f"{name} must be at most {maximum:,}, found {value}")
    return cast("int", value)


def positive_float(name: str, value: object) -> float:
    """Return `value` as a positive finite float, or raise."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a positive number, found {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, found {value}")
    return float(value)


def non_negative_float(name: str, value: object) -> float:
    """Return `value` as a finite float of at least 0, or raise."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of at least 0, found {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be at least 0 and finite, found {value}")
    return float(value)


@contextlib.contextmanager
def needing(what: str, packages: str) -> Iterator[None]:
    """Replace an ImportError with one that names the feature that needs the package, and how to install it."""
    try:
        yield
    except ImportError:
        raise ImportError(f"{what}: pip install {packages}") from None


def renamed(**names: str) -> Callable[[Any], Any]:
    """Return a decorator that lets keyword arguments be passed by their old names, with a DeprecationWarning.

    Args:
        **names: the new name of each old name.
    """

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for old in names.keys() & options.keys():
                new = names[old]
                if new in options:
                    raise TypeError(f"{old}= is the old name of {new}=; pass {new}= alone")
                warnings.warn(f"{old}= is now {new}=; {old}= stops working in 0.2", DeprecationWarning, stacklevel=2)
                options[new] = options.pop(old)
            return function(*args, **options)

        return call

    return decorate
