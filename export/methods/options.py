"""Options of methods, declared once as data: what may be written behind a method's name.

A method's options are a frozen dataclass (``MethodOptions``) whose fields are made by
``option``: the default, the values it may have, and a sentence. Reading a request,
refusals, ``kvlathe build --help``, ``kvlathe methods``, the docstring of the class and
the table of docs/methods.md all take them from there.

>>> @dataclass(frozen=True)
... class Mine(MethodOptions):
...     bits: int = option(4, Choice(2, 4), "Bits of a code.")
>>> [one.written for one in options_of(Mine())]
['bits=4|2']
>>> read("mine", Mine(), {"bits": "2"})
{'bits': 2}
>>> read("mine", Mine(), {"bits": "3"})
Traceback (most recent call last):
    ...
kvlathe.base.errors.KvlatheError: bits=3 is unknown. Choose one of 2, 4.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass
from typing import Literal, TypeVar

from kvlathe.base.errors import KvlatheError

DEFAULT_RATE = 0.15
"""The removal rate of a plan that nobody searched a size for."""
MOST = 1 << 29
"""Tokens that no sequence has: the end of counts."""
DECLARED = "option"
"""Key of a field's metadata."""

T = TypeVar("T")


# -- what values there are -------------------------------------------------------------
class Kind:
    """The values that an option may have, and how they are written."""

    values: tuple[int | str, ...] = ()
    """All of them, where they are few."""

    def read(self, text: str) -> object:
        """The value that ``text`` writes. Raises ValueError where it is none."""
        raise NotImplementedError

    def takes(self, value: object) -> bool:
        """Whether an option may have this value."""
        raise NotImplementedError

    def refusal(self, fact: str, text: str, example: str) -> KvlatheError:
        """The refusal of ``text``: ``fact`` is ``name=text``, ``example`` what to write
        instead, if anything is the default."""
        raise NotImplementedError

    def write(self, value: object) -> str:
        """``value`` as ``read`` takes it."""
        return str(value)

    def written(self, default: object) -> str:
        """The values as they may be written, the default first."""
        return "" if default is None else self.write(default)


class Choice(Kind):
    """A few values, each written as ``str`` has it, truth values in small letters."""

    def __init__(self, *values: int | str) -> None:
        self.values = values

    def read(self, text: str) -> int | str:
        for value in self.values:
            if self.write(value) == text:
                return value
        raise ValueError(text)

    def takes(self, value: object) -> bool:
        return value in self.values

    def refusal(self, fact: str, text: str, example: str) -> KvlatheError:
        return unknown(fact, text, map(self.write, self.values))

    def write(self, value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    def written(self, default: object) -> str:
        first = [default] if default in self.values else []
        others = [value for value in self.values if value != default]
        return "|".join(self.write(value) for value in (*first, *others))


@dataclass(frozen=True)
class Number(Kind):
    """A number from ``least`` to ``most``: ``what``, in words. ``whole``: it counts
    something. ``above``, ``below``: the end itself is left out. ``words`` may be written
    in place of a number."""

    what: str
    least: float = 0
    most: float = 1
    whole: bool = False
    above: bool = False
    below: bool = False
    words: tuple[str, ...] = ()

    def read(self, text: str) -> float | str:
        if text in self.words:
            return text
        number = float(text)
        return int(number) if self.whole and number.is_integer() else number

    def takes(self, value: object) -> bool:
        if isinstance(value, str):
            return value in self.words
        if not isinstance(value, int if self.whole else int | float):
            return False
        is_low = value <= self.least if self.above else value < self.least
        is_high = value >= self.most if self.below else value > self.most
        return not (is_low or is_high or math.isnan(value))

    @property
    def range(self) -> str:
        """The numbers that it may be, in words."""
        if self.above:
            return f"above {self.least:g} and at most {self.most:g}"
        if self.most >= MOST:
            return f"from {self.least:g} on"
        return f"from {self.least:g} {'up to' if self.below else 'to'} {self.most:g}"

    def refusal(self, fact: str, text: str, example: str) -> KvlatheError:
        words = f", or {' or '.join(self.words)}" if self.words else ""
        reason = f"it is {self.what}, {self.range}{words}"
        remedy = f"write for example {example}" if example else "give such a number"
        return KvlatheError(f"{fact} cannot be used", reason, remedy)


def count(what: str, least: int = 0) -> Number:
    """A number of things."""
    return Number(what, least, MOST, whole=True)


# -- one option ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Option:
    """One option of a method: ``name=value`` behind the method's name. ``about``: a
    sentence for people. ``sizes``: whether it says how small the cache becomes, so that a
    search tries its values. ``also``: names that it once had."""

    name: str
    kind: Kind
    default: object
    about: str
    sizes: bool = False
    also: tuple[str, ...] = ()

    def read(self, text: str) -> object:
        """The value that was written. Raises KvlatheError where it may have none such."""
        try:
            value = self.kind.read(text)
        except ValueError:
            value = None
        if value is None or not self.kind.takes(value):
            raise self._refusal(text)
        return value

    def check(self, value: object) -> None:
        """Raise KvlatheError for a value that it may not have."""
        if not self.kind.takes(value) and value != self.default:
            raise self._refusal(self.kind.write(value))

    def _refusal(self, text: str) -> KvlatheError:
        example = ""
        if self.default is not None:
            example = f"{self.name}={self.kind.write(self.default)}"
        return self.kind.refusal(f"{self.name}={text}", text, example)

    @property
    def written(self) -> str:
        """Its name and what may be written behind it, the default first."""
        values = self.kind.written(self.default)
        return f"{self.name}={values}" if values else self.name


def option(
    default: T,
    kind: Kind,
    about: str,
    sizes: bool = False,
    also: tuple[str, ...] = (),
) -> T:
    """A field of a ``MethodOptions``, as in ``Option``."""
    declared = Option("", kind, default, about, sizes, also)
    return dataclasses.field(default=default, metadata={DECLARED: declared})


def _named(name: str, field: Field[object]) -> Option:
    """The option that the field ``name`` declares."""
    declared: Option = field.metadata[DECLARED]
    return dataclasses.replace(declared, name=name)


@dataclass(frozen=True)
class MethodOptions:
    """The options of a method: a frozen dataclass of ``option`` fields. Its docstring
    gets a line for each. Making one raises KvlatheError for values that there are
    not."""

    def __init_subclass__(cls) -> None:
        lines = [(cls.__doc__ or "").rstrip(), ""]
        for name, field in vars(cls).items():
            if isinstance(field, Field):
                declared = _named(name, field)
                lines.append(f"    {declared.written}: {declared.about}")
        cls.__doc__ = "\n".join(lines)

    def __post_init__(self) -> None:
        for declared in _declared(self):
            declared.check(getattr(self, declared.name))


@dataclass(frozen=True)
class NoOptions(MethodOptions):
    """Nothing may be asked."""


def _declared(of: MethodOptions) -> list[Option]:
    """Every option, with the defaults of the class."""
    return [_named(field.name, field) for field in dataclasses.fields(of)]


def options_of(defaults: MethodOptions) -> list[Option]:
    """Every option, with the defaults that ``defaults`` has."""
    return [
        dataclasses.replace(one, default=getattr(defaults, one.name))
        for one in _declared(defaults)
    ]


def read(
    method: str, defaults: MethodOptions, written: Mapping[str, str]
) -> dict[str, object]:
    """The values that were ``written`` behind the name of ``method``, by the options'
    names. Raises KvlatheError for unknown names and for values that an option may not
    have."""
    known = options_of(defaults)
    by_name = {name: one for one in known for name in (one.name, *one.also)}
    values: dict[str, object] = {}
    for name, text in written.items():
        if name not in by_name:
            fact = f"the option {name!r} of {method}"
            raise unknown(fact, name, [one.name for one in known])
        one = by_name[name]
        if one.name in values:
            raise KvlatheError(
                f"{name}={text} cannot be used",
                f"{one.name} is given already",
                "give one",
            )
        values[one.name] = one.read(text)
    return values


def unknown(what: str, given: str, known: Iterable[str]) -> KvlatheError:
    """A refusal that lists what there is and guesses what was meant."""
    known = list(known)
    if not known:
        return KvlatheError(f"{what} is unknown", "it has none", "leave it out")
    near = difflib.get_close_matches(given, known, 1, 0.5)
    guess = f"Did you mean {near[0]}? " if near else ""
    remedy = f"{guess}Choose one of {', '.join(known)}"
    return KvlatheError(f"{what} is unknown", remedy=remedy)


# -- the options of methods that choose ranks ------------------------------------------
@dataclass(frozen=True)
class RankOptions(MethodOptions):
    """The target of methods that choose ranks, and the way there; ``kvlathe build`` has flags of
    the same names. At most one of ``removal_rate`` and ``compression_ratio``; where
    there is neither, a build searches for one, and a plan alone takes DEFAULT_RATE.

    r is taken by the papers' rule on the papers' bases and sets the bytes; every basis
    and allocation spends the same bytes.
    """

    removal_rate: float | None = option(
        None,
        Number("a fraction", below=True),
        "Share of the singular values that each head may lose (the papers' r).",
    )
    compression_ratio: float | None = option(
        None,
        Number("a fraction", below=True),
        "Share of the KV bytes to remove.",
    )
    basis: Literal["svd", "balanced"] | None = option(
        None,
        Choice("svd", "balanced"),
        "The papers' shared rotation, or the one best for what attention uses. "
        "[default: svd; balanced where a build searches for the size]",
    )
    allocation: Literal["rate", "uniform", "global"] | None = option(
        None,
        Choice("rate", "uniform", "global"),
        "Ranks by one removal rate, one rank for all heads, or bytes where they save "
        "most. [default: rate; global with basis balanced]",
    )
    rope_fold: Literal["none", "planes"] = option(
        "none",
        Choice("none", "planes"),
        "Keep whole RoPE planes, so that nothing is projected at run time.",
    )
    centre: bool = option(
        False,
        Choice(False, True),
        "Cache K and V less their means; exact, and often smaller. The balanced basis "
        "always does.",
    )

    def __post_init__(self) -> None:
        MethodOptions.__post_init__(self)
        if self.removal_rate is not None and self.compression_ratio is not None:
            raise KvlatheError(
                "removal_rate and compression_ratio exclude each other",
                "each says how much to remove",
                "give one",
            )

    @property
    def spending(self) -> Literal["rate", "uniform", "global"]:
        """The papers' shared rate goes with their bases; the balanced basis knows its
        losses and spends by them."""
        return self.allocation or ("global" if self.basis == "balanced" else "rate")

    def asked(self, **changes: object) -> RankOptions:
        """With ``changes``; a new target replaces the old one."""
        if {"removal_rate", "compression_ratio"} & changes.keys():
            changes = {"removal_rate": None, "compression_ratio": None, **changes}
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
