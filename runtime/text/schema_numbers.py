"""Numbers of JSON schemas, as far as llguidance reads them exactly."""

from __future__ import annotations

import math
from decimal import Decimal

EXACT, FARTHEST, TENS = 1 << 53, (1 << 63) - (1 << 10), 22
"""llguidance reads numbers as doubles, and counts bounds in 64 bits: whole numbers up to
the first are exact, and the second is its last double. It may miss a double by a digit,
but not where the digits are exact, and so is the power of ten beside them."""
LOWER = ("minimum", "exclusiveMinimum")
BOUNDS = (*LOWER, "maximum", "exclusiveMaximum")


def check_exact(value: object) -> None:
    """Raises ValueError for a number in ``value`` that llguidance would round."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict | list):
            left += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int | float) and not is_exact(one):
            raise ValueError(
                f"{one} has too many digits: round it, or make it a string"
            )


def is_exact(number: float) -> bool:
    """Whether llguidance reads a number as what it is."""
    if isinstance(number, int):
        return abs(number) <= FARTHEST and float(number) == number
    parts = Decimal(repr(number)).as_tuple()
    digits = int("".join(map(str, parts.digits)))
    return digits <= EXACT and abs(int(parts.exponent)) <= TENS


def bound(name: str, value: object) -> object:
    """A bound of numbers as a double on its inner side, at most FARTHEST from 0. Raises
    ValueError where nothing is left."""
    if not isinstance(value, int | float) or abs(value) <= EXACT:
        return value
    lower = name in LOWER
    near = int(min(max(value, -FARTHEST), FARTHEST))
    if (near < value) if lower else (near > value):
        raise ValueError(f"{name} is beyond {FARTHEST}, as far as numbers are counted")
    rounded = float(near)
    if (rounded < near) if lower else (rounded > near):
        rounded = math.nextafter(rounded, math.inf if lower else -math.inf)
    return int(rounded)
