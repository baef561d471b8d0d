"""The minimum of a function of one number whose every call is dear."""

import math
from collections.abc import Callable


def minimum_between(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """Where a function with one minimum between two places has it, to within a width.

        min(torch.linspace(low, high, 10**6), key=function)

    Brent's method: the vertex of the parabola through the three lowest places so far, or a golden section where that
    would leave the bracket or not shrink the steps. A smooth function takes about half a dozen calls, ends included.
    """
    # The middle first: it stays where all are the same.
    known = sorted(((function(place), place) for place in ((low + high) / 2, low, high)), key=lambda pair: pair[0])
    (at_best, best), (at_second, second), (at_third, third) = known
    tolerance = width / 2
    step = before = high - low
    while True:
        middle = (low + high) / 2
        if abs(best - middle) + (high - low) / 2 <= 2 * tolerance:
            return best
        # The vertex is at best + up / down.
        left, right = (best - second) * (at_best - at_third), (best - third) * (at_best - at_second)
        up, down = (best - third) * right - (best - second) * left, 2 * (left - right)
        up, down = (up, down) if down > 0 else (-up, -down)
        if abs(up) < abs(0.5 * down * before) and down * (low - best) < up < down * (high - best):
            step, before = up / down, step
            if min(best + step - low, high - best - step) < 2 * tolerance:
                step = math.copysign(tolerance, middle - best)
        else:
            before = (low if best >= middle else high) - best
            step = (3 - math.sqrt(5)) / 2 * before
        tried = best + (step if abs(step) >= tolerance else math.copysign(tolerance, step))
        at_tried = function(tried)
        # What is not the best any more, or never was, bounds the bracket on its side of the best.
        if at_tried < at_best:
            low, high = (best, high) if tried >= best else (low, best)
            best, second, third = tried, best, second
            at_best, at_second, at_third = at_tried, at_best, at_second
        else:
            low, high = (tried, high) if tried < best else (low, tried)
            if at_tried <= at_second or second == best:
                second, third, at_second, at_third = tried, second, at_tried, at_second
            elif at_tried <= at_third or third in (best, second):
                third, at_third = tried, at_tried
