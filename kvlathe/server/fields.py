"""Kinds of fields in requests: numbers and lists as JSON has them, and fields that are
refused or ignored."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, cast

from annotated_types import Interval
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvlathe.runtime.text.sampling_params import RANGES

MAX_FIELDS = 100


def whole(value: object) -> object:
    """JSON knows no integers: 1.0 is one."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def wholes(values: object) -> object:
    """The same for each of a list."""
    if not isinstance(values, list):
        return values
    items = cast("list[object]", values)
    return [whole(item) if type(item) is float else item for item in items]


def interval_of(name: str) -> Interval:
    """The interval of a parameter: HTTP takes the numbers that Python takes."""
    span = RANGES[name]
    if span.open_low:
        return Interval(gt=span.low, le=span.high)
    return Interval(ge=span.low, le=span.high)


T = TypeVar("T")
Json = dict[str, Any]
Integer = Annotated[int, BeforeValidator(whole)]
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first fault is all that is said: a body of a few megabytes can
hold a million."""
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]],
    Field(fail_fast=True),
    BeforeValidator(wholes),
]
NOTHING: tuple[object, ...] = (None, [], {}, "", "none", ["text"], {"type": "text"})
"""Values by which a field asks for what is done anyway."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: object) -> object:
        """Each unknown field would be a fault of its own."""
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise PydanticCustomError(
                "fields", "at most {most} fields", {"most": MAX_FIELDS}
            )
        return given


def unsupported(value: T) -> T:
    """A field that is refused unless it asks for nothing."""
    if value in NOTHING:
        return value
    raise PydanticCustomError(
        "unsupported", "this server cannot do that; leave the field out"
    )


Refused = Annotated[
    object,
    BeforeValidator(unsupported),
    WithJsonSchema({"enum": [*NOTHING]}),
]
Ignored = object
