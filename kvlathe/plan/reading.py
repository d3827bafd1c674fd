"""Fields of a file against the types that their dataclass declares.

JSON knows no tuples and takes any value anywhere. Whatever passes here has the types
that the code was written for, so what follows needs to look at values alone.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import (
    Any,
    Literal,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """The resolved types of a dataclass's fields."""
    return get_type_hints(kind)


def require(value: object, kind: object, where: str) -> None:
    """Raise TypeError, naming ``where``, unless ``value`` is of the type ``kind``: a
    number, a text, a tuple, a mapping, a Literal, a union or a dataclass of them.
    """
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        _require_option(value, options, where)
    elif origin is tuple:
        _require(isinstance(value, tuple), where, "a list")
        for item in cast("tuple[object, ...]", value):
            require(item, options[0], where)
    elif origin is Literal:
        allowed = any(type(x) is type(value) and x == value for x in options)
        _require(allowed, where, f"one of {options}")
    elif origin is dict:
        _require(isinstance(value, dict), where, "a mapping")
    else:
        _require_one(value, kind, where)


def _require_option(value: object, options: tuple[object, ...], where: str) -> None:
    """Of a union: None where it is allowed, else the one other type."""
    if value is None and type(None) in options:
        return
    kind = next(option for option in options if option is not type(None))
    require(value, kind, where)


def _require_one(value: object, kind: object, where: str) -> None:
    """A dataclass, a number or a text. A whole number is a number, too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        _require(isinstance(kind, type) and isinstance(value, kind), where, str(kind))
        hints = hints_of(type(value))
        for field in dataclasses.fields(value):
            name = f"{where}.{field.name}"
            require(getattr(value, field.name), hints[field.name], name)
    elif kind is float:
        is_number = type(value) in (int, float)
        _require(is_number, where, "a number")
        _require(abs(cast(float, value)) < 1 << 64, where, "a number of this size")
    else:
        _require(type(value) is kind, where, str(kind))


def _require(holds: bool, where: str, wanted: str) -> None:
    if not holds:
        raise TypeError(f"{where} is not {wanted}")
