"""Reading JSON that somebody else may have written, by the types that dataclasses
declare.

A dataclass is an object with exactly its fields, and a tuple is a list. Anything else
is a ValueError that names the field. So what follows needs to look at values alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

Kind = TypeVar("Kind")
LARGEST = 1 << 64
"""Numbers of this size and beyond are none of ours."""


@dataclass(frozen=True, slots=True)
class Where:
    """Beside a type, in ``Annotated``: which of its values are allowed."""

    holds: Callable[[Any], bool]
    words: str


@dataclass(frozen=True, eq=False, slots=True)
class OneOf:
    """Beside a base class, in ``Annotated``: the field ``kind`` names which of its
    classes an object is. Types compare it by identity."""

    classes: Mapping[str, type]


Count = Annotated[int, Where(lambda value: value >= 0, "a count")]
Positive = Annotated[int, Where(lambda value: value > 0, "a number from 1 up")]
PositiveFloat = Annotated[float, Where(lambda value: value > 0, "above 0")]
Sha256 = Annotated[
    str, Where(lambda value: re.fullmatch("[0-9a-f]{64}", value) is not None, "SHA-256")
]


def parse(text: str) -> object:
    """``json.loads`` whose every failure is a ValueError.

    Python's own parser raises RecursionError for text that is nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read(kind: type[Kind], value: object, name: str = "it") -> Kind:
    """The dataclass ``kind`` with the fields that ``value`` gives. Raises ValueError,
    which calls it ``name``."""
    return cast(Kind, _dataclass(kind, value, name, ()))


def _read(kind: object, value: object, name: str) -> object:
    """``value`` as the declared type ``kind``."""
    options = get_args(kind)
    reader = READERS.get(get_origin(kind))
    if reader is not None:
        return reader(options, value, name)
    if kind is Any:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, name, ())
    if kind is float:
        return _float(value, name)
    _require(type(value) is kind, name, f"of the type {kind}")
    return value


def _dataclass(kind: type, value: object, name: str, others: tuple[str, ...]) -> object:
    """``others``: keys beside the fields that are set when it is made."""
    hints = _hints_of(kind)
    fields = _object(value, name)
    made = [field.name for field in dataclasses.fields(kind) if field.init]
    wrong = sorted(fields.keys() ^ {*made, *others})
    _require(not wrong, name, f"right: it lacks or should not have {', '.join(wrong)}")
    return kind(
        **{key: _read(hints[key], fields[key], f"{name}.{key}") for key in made}
    )


@functools.cache
def _hints_of(kind: type) -> dict[str, object]:
    """The resolved types of a dataclass's fields, with what stands beside them."""
    return get_type_hints(kind, include_extras=True)


Options = tuple[Any, ...]
"""The arguments of a generic type."""


def _annotated(options: Options, value: object, name: str) -> object:
    kind, beside = options
    if isinstance(beside, OneOf):
        return _one_of(beside, value, name)
    result = _read(kind, value, name)
    _require(beside.holds(result), name, beside.words)
    return result


def _one_of(beside: OneOf, value: object, name: str) -> object:
    kind = _object(value, name).get("kind")
    known = isinstance(kind, str) and kind in beside.classes
    names = ", ".join(beside.classes)
    _require(known, f"{name}.kind", f"one of {names}")
    return _dataclass(beside.classes[cast(str, kind)], value, name, ("kind",))


def _optional(options: Options, value: object, name: str) -> object:
    """A value of a union: None where it is allowed, else the one other type."""
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    return _read(kind, value, name)


def _tuple(options: Options, value: object, name: str) -> object:
    _require(isinstance(value, list), name, "a list")
    return tuple(_read(options[0], item, name) for item in cast("list[object]", value))


def _mapping(options: Options, value: object, name: str) -> object:
    _, kind = options
    items = _object(value, name).items()
    return {key: _read(kind, item, f"{name}.{key}") for key, item in items}


def _literal(options: Options, value: object, name: str) -> object:
    allowed = any(type(x) is type(value) and x == value for x in options)
    _require(allowed, name, f"one of {options}")
    return value


READERS: Mapping[object, Callable[[Options, object, str], object]] = {
    Annotated: _annotated,
    Union: _optional,
    types.UnionType: _optional,
    tuple: _tuple,
    dict: _mapping,
    Mapping: _mapping,
    Literal: _literal,
}
"""The reader of each generic type, by its origin."""


def _float(value: object, name: str) -> object:
    """A whole number is one, too. It stays whole, so that digests stay the same."""
    _require(type(value) in (int, float), name, "a number")
    _require(abs(cast(float, value)) < LARGEST, name, "a number of this size")
    return value


def _object(value: object, name: str) -> dict[str, object]:
    _require(isinstance(value, dict), name, "an object")
    return cast("dict[str, object]", value)


def _require(holds: bool, name: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is not {wanted}")
