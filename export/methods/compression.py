"""A compression: what ``--compression`` names, parsed once into a value that the whole
build carries.

>>> asked = parse("fdc+hack:bits=4")
>>> [one.name for one in asked.methods]
['fdc', 'hack']
>>> asked.methods[1].options.bits
4
>>> asked.calibration
'random'
>>> str(asked)
'fdc+hack:bits=4'
>>> parse("hack:bits=5")
Traceback (most recent call last):
    ...
kvlathe.base.errors.KvlatheError: bits=5 is unknown. Choose one of 2, 3, 4, 8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods import none
from kvlathe.export.methods.method import Decision, Method, Source
from kvlathe.export.methods.options import (
    MethodOptions,
    RankOptions,
    options_of,
    read,
)
from kvlathe.export.methods.registry import method
from kvlathe.plan.heads import ModelShape


@dataclass(frozen=True, slots=True)
class RequestedMethod:
    """One method of a compression: all of its ``options``, the names of those that were
    ``written``, and its ``text`` for people."""

    name: str
    method: Method[Any]
    options: MethodOptions
    written: tuple[str, ...] = ()
    text: str = ""

    @classmethod
    def plain(cls, name: str) -> RequestedMethod:
        """A method with nothing written behind its name. Raises KvlatheError where
        there is none."""
        found = method(name)
        return cls(name, found, found.options, text=name)

    def asked(self, **values: object) -> RequestedMethod:
        """With these options written behind the others."""
        known = {one.name: one for one in options_of(self.options)}
        text = self.text
        for name, value in values.items():
            separator = "," if ":" in text else ":"
            text += f"{separator}{name}={known[name].kind.write(value)}"
        options = dataclasses.replace(self.options, **values)
        written = (*self.written, *values)
        return dataclasses.replace(self, options=options, written=written, text=text)

    @property
    def source(self) -> Source | None:
        """The tokens that it calibrates on."""
        if self.method.source is not None:
            return self.method.source(self.options)
        return self.method.calibration

    def outline(self, page_tokens: int) -> Decision:
        """Its decision without statistics. Raises KvlatheError."""
        return self.method.plan(self.options, page_tokens)

    def with_heads(self, losses: Sequence[float], heads: int) -> RequestedMethod:
        """The method that names the heads which see everything, where measured losses
        decide that. What was written of options that both have stays."""
        if self.method.name_heads is None:
            return self
        name, values = self.method.name_heads(self.options, losses, heads)
        plain = RequestedMethod.plain(name)
        shared = {one.name for one in options_of(plain.options)} - values.keys()
        kept = {x: getattr(self.options, x) for x in self.written if x in shared}
        return plain.asked(**kept, **values)

    def overruling(self, flags: RankOptions) -> RankOptions:
        """``flags`` overruled by what is written behind a method that chooses ranks."""
        values = {name: getattr(self.options, name) for name in self.written}
        return flags.asked(**values) if values else flags


@dataclass(frozen=True, slots=True)
class Compression:
    """The methods that were asked for, one or a composition, and the ``text`` that
    people wrote. Plans, manifests and reports keep the text."""

    methods: tuple[RequestedMethod, ...]
    text: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, methods: Iterable[RequestedMethod]) -> Compression:
        """A composition, as it would be written."""
        parts = tuple(methods)
        return cls(parts, "+".join(part.text for part in parts))

    @property
    def choosing_ranks(self) -> tuple[RequestedMethod, ...]:
        """Those that decide how many dimensions are kept: one at most can be planned."""
        return tuple(one for one in self.methods if one.method.rotate)

    @property
    def has_size(self) -> bool:
        """Whether it is written how much its ranks remove."""
        sizes = {"removal_rate", "compression_ratio"}
        return any(sizes & set(one.written) for one in self.choosing_ranks)

    @property
    def ranks_alone(self) -> Compression:
        """The method that chooses ranks, without the others."""
        return Compression.of(self.choosing_ranks)

    @property
    def removes_nothing(self) -> bool:
        """Whether it is the uncompressed model that was asked for."""
        return all(one.method is none.METHOD for one in self.methods)

    @property
    def calibration(self) -> Source | None:
        """The tokens that its methods calibrate on by default: text where one of them needs it,
        None where none calibrates."""
        sources = {one.source for one in self.methods}
        if "text" in sources:
            return "text"
        return "random" if "random" in sources else None

    @property
    def reads_entropies(self) -> bool:
        """Whether one of its methods reads a calibration's entropies."""
        return any(one.method.entropies for one in self.methods)

    @property
    def measured(self) -> bool:
        """Whether its plans come from measurements of the model."""
        return any(one.method.measured for one in self.methods)

    @property
    def measures_heads(self) -> bool:
        """Whether measured losses decide which of its heads see everything."""
        return any(one.method.name_heads for one in self.methods)

    def with_heads(self, losses: Sequence[float], heads: int) -> Compression:
        """The same with those heads named, by what the window costs each lane: [layers *
        ``heads``]."""
        return Compression.of(one.with_heads(losses, heads) for one in self.methods)

    def check_model(self, shape: ModelShape) -> None:
        """Raise KvlatheError for options that no model of this ``shape`` can have. It
        needs no statistics: ask before calibrating."""
        for one in self.methods:
            if one.method.check is not None:
                one.method.check(one.options, shape)


UNCOMPRESSED = Compression(
    (RequestedMethod("none", none.METHOD, none.METHOD.options, text="none"),), "none"
)
"""The model as it is."""


def parse(text: str) -> Compression:
    """Read ``name``, ``name:option=value,option=value`` or a composition ``a+b``. A
    build calls this once.

    Raises KvlatheError where the text cannot be read, for unknown names, options and
    values, and where a method that chooses everything itself stands beside others.
    """
    methods = tuple(_read(part.strip()) for part in text.split("+"))
    alone = [one.name for one in methods if one.method.measured]
    if alone and len(methods) > 1:
        names = " and ".join(one.name for one in methods)
        raise KvlatheError(
            f"{names} cannot be composed",
            f"{alone[0]} chooses the ranks and the number formats itself",
            f"ask for {alone[0]} alone, or for the others",
        )
    return Compression(methods, text)


def _read(text: str) -> RequestedMethod:
    """One method of a compression."""
    name, _, tail = text.partition(":")
    pairs = [pair.partition("=") for pair in tail.split(",")] if tail else []
    if not name or any(not (key and equals and value) for key, equals, value in pairs):
        raise KvlatheError(
            f"the compression {text!r} cannot be read",
            "it is not name:option=value,option=value",
            "write for example fdc or hack:bits=4",
        )
    texts = {key.strip(): value.strip() for key, _, value in pairs}
    if len(texts) < len(pairs):
        raise KvlatheError(
            f"the compression {text!r} cannot be read",
            "it has an option twice",
            "keep one of them",
        )
    name = name.strip().lower()
    found = method(name)
    values = read(name, found.options, texts)
    options = dataclasses.replace(found.options, **values)
    return RequestedMethod(name, found, options, tuple(values), text.rstrip(":"))
