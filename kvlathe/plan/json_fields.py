"""Reading JSON that somebody else may have written: each field has one type, and
anything else is a ValueError that names the field."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

Value = TypeVar("Value")
DIGEST = re.compile("[0-9a-f]{64}")


def parse(text: str) -> object:
    """``json.loads`` whose every failure is a ValueError.

    Python's own parser raises RecursionError for text that is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{name} is no text")


def sha256(name: str, value: object) -> str:
    """64 hexadecimal digits."""
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return value
    raise ValueError(f"{name} is no SHA-256")


def count(name: str, value: object) -> int:
    """A whole number from 0 up."""
    if type(value) is int and value >= 0:
        return value
    raise ValueError(f"{name} is no count")


def positive(name: str, value: object) -> int:
    """A whole number from 1 up."""
    if count(name, value) > 0:
        return count(name, value)
    raise ValueError(f"{name} is 0")


def number(name: str, value: object) -> float:
    """A finite number above 0."""
    is_number = type(value) in (int, float)
    if is_number and 0 < cast(float, value) <= sys.float_info.max:
        return float(cast(float, value))
    raise ValueError(f"{name} is no positive number")


def texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(text(name, one) for one in value)
    raise ValueError(f"{name} is no list")


def table(
    read: Callable[[str, object], Value],
) -> Callable[[str, object], dict[str, Value]]:
    """A reader of objects whose every value ``read`` reads."""

    def reader(name: str, value: object) -> dict[str, Value]:
        if not isinstance(value, dict):
            raise ValueError(f"{name} is no object")
        return {key: read(f"{name}.{key}", one) for key, one in value.items()}

    return reader


def fields(
    name: str, value: object, readers: Mapping[str, Callable[[str, object], object]]
) -> dict[str, object]:
    """The values of an object that has exactly the keys of ``readers``."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object")
    if wrong := sorted(value.keys() ^ readers.keys()):
        raise ValueError(f"{name} lacks or should not have {', '.join(wrong)}")
    prefix = f"{name}." if name else ""
    return {key: read(prefix + key, value[key]) for key, read in readers.items()}
