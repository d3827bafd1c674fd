"""Numbers of JSON schemas, spelled so that llguidance reads them exactly.

It takes the double nearest to all digits, and multiplies or divides that by the double
nearest to a power of ten (serde_json without ``float_roundtrip``). So it misses one
double of 17 digits in nine by a digit. Nearly each has another spelling that it does not
miss: the digits and the power of ten are free, and only their quotient counts.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction

EXACT, FARTHEST = 1 << 53, (1 << 63) - (1 << 10)
"""llguidance reads numbers as doubles, and counts bounds in 64 bits: whole numbers up to
the first are exact, and the second is its last double."""
DIGITS, TENS = 19, 308
"""Digits that its 64 bits hold, and its last power of ten."""
STEPS = 64
"""Doubles that are tried for one with a spelling: seven of ten thousand have none."""
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
    return spelling(number) is not None


def spelling(number: float) -> str | None:
    """A decimal that llguidance reads as ``number``: 30000000000000004e-17. None where
    none is found."""
    if not math.isfinite(number):
        return None
    size, sign = abs(number), "-" * (number < 0)
    shortest = Decimal(repr(size))
    for digits in range(len(shortest.as_tuple().digits), DIGITS + 1):
        power = shortest.adjusted() + 1 - digits
        near = float(round(Fraction(size) / Fraction(10) ** power))
        for other in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)):
            if read(int(other), power) == size:
                return f"{sign}{int(other)}e{power}"
    return None


def read(digits: int, power: int) -> float | None:
    """What llguidance reads from digits and a power of ten, None beyond TENS."""
    if abs(power) > TENS:
        return None
    ten = float(f"1e{abs(power)}")
    return digits / ten if power < 0 else digits * ten


def spelled(value: object) -> str:
    """JSON whose numbers llguidance reads exactly, where they have a spelling."""
    if isinstance(value, dict):
        parts = (f"{json.dumps(name)}: {spelled(one)}" for name, one in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spelled, value)) + "]"
    own = spelling(value) if isinstance(value, float) else None
    return own or json.dumps(value)


def bound(name: str, value: object) -> object:
    """A bound of numbers as a double on its inner side that llguidance reads exactly, at
    most FARTHEST from 0. Raises ValueError where nothing is left."""
    if not isinstance(value, int | float):
        return value
    lower = name in LOWER
    inner = math.inf if lower else -math.inf
    if abs(value) <= EXACT:
        return value if isinstance(value, int) else spellable(name, value, inner)
    near = int(min(max(value, -FARTHEST), FARTHEST))
    if (near < value) if lower else (near > value):
        raise ValueError(f"{name} is beyond {FARTHEST}, as far as numbers are counted")
    rounded = float(near)
    if (rounded < near) if lower else (rounded > near):
        rounded = math.nextafter(rounded, inner)
    return int(rounded)


def spellable(name: str, value: float, inner: float) -> float:
    """The first double from ``value`` towards ``inner`` that has a spelling. Raises
    ValueError where none is near, as below 1e-308."""
    near = value
    for _ in range(STEPS):
        if spelling(near) is not None:
            return near
        near = math.nextafter(near, inner)
    raise ValueError(f"{name} has too many digits: round {value}")
