"""What a method may be asked (Options), what it answers (Decision), and how a request
is spelled."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis
from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import Life
from kvlathe.plan.observation import ObservationWindow
from kvlathe.plan.stages import Stage

Scales = Literal["", "k", "v", "kv"]
"""Whose channels are divided by a factor each (channels.py)."""
Hadamard = Literal["auto", "none", "k", "v", "kv"]
"""Which side gets a Hadamard rotation before it is quantized (hadamard.py): ``auto``
where groups run along the rank and it costs nothing."""

DEFAULT_RATE = 0.15
"""The removal rate where no target is given."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much to remove and how. At most one of ``removal_rate`` (the papers' r) and
    ``compression_ratio`` (fraction of KV bytes removed, against the uncompressed cache
    in the same number format); neither means DEFAULT_RATE.

    r is taken by the papers' rule on the papers' bases and sets the bytes; every basis
    and allocation spends the same bytes.

    ``allocation``: ranks by the shared rate, one rank for all lanes at the same bytes
    (``uniform``), or bytes spent where they save most (``global``). ``rope_fold``
    ``planes``: keep whole RoPE planes instead of projecting K after RoPE.
    ``centre``: take the mean out of K and V (the balanced basis always does).
    """

    removal_rate: float | None = None
    compression_ratio: float | None = None
    basis: Literal["svd", "balanced"] = "svd"
    allocation: Literal["rate", "uniform", "global"] | None = None
    rope_fold: Literal["none", "planes"] = "none"
    centre: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise unknown(
                    f"{name} {value!r}", value, [choice for choice in allowed if choice]
                )
        for name in ("removal_rate", "compression_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise KvlatheError(
                    f"{name} {value} cannot be used",
                    "it is a fraction",
                    "give a number from 0 up to 1",
                )
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

    def asked(self, **changes: object) -> Options:
        """With ``changes``; a new target replaces the old one."""
        if {"removal_rate", "compression_ratio"} & changes.keys():
            changes = {"removal_rate": None, "compression_ratio": None, **changes}
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


CHOICES = {
    "basis": ("svd", "balanced"),
    "allocation": (None, "rate", "uniform", "global"),
    "rope_fold": ("none", "planes"),
}


@dataclass(frozen=True)
class Decision:
    """What one method decided. A field that is empty is left to others.

    ``lanes`` with their ``basis``: the ranks. ``cold``: the number format that full
    pages are quantized to. ``split``: several of them instead, each with its share of
    the tokens, the most salient first. ``hadamard``, ``scales``: the sides that are
    rotated, or scaled by statistics, before that. ``tokens``: how each lane's
    tokens live, one life for all lanes or one each; ``observation``: what they are ranked
    by. ``apart``: whether every lane is a group of its own.
    ``whole_heads``: (layer, head) of lanes that keep all tokens whatever the life.
    ``stages`` of the layers. ``removed``: lanes that are filled from another head, lane
    -> head. ``notes`` are for people.
    """

    lanes: tuple[Lane, ...] | None = None
    basis: Basis = field(default_factory=Basis)
    cold: Tier | None = None
    split: tuple[tuple[Tier, float], ...] = ()
    hadamard: Hadamard = "none"
    scales: Scales = ""
    tokens: tuple[Life, ...] = ()
    apart: bool = False
    observation: ObservationWindow | None = None
    whole_heads: tuple[tuple[int, int], ...] = ()
    stages: tuple[Stage, ...] = ()
    removed: Mapping[int, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def has_budget(self) -> bool:
        """Whether lanes keep a number of tokens, not a share of them or all."""
        return any(life.drops for life in self.tokens)

    @property
    def compacts(self) -> bool:
        """Whether prefixes can be compacted."""
        return any(life.compaction is not None for life in self.tokens)

    @property
    def windowed(self) -> bool:
        """Whether lanes see a window of the tokens."""
        return any(life.sees.is_less for life in self.tokens)


@dataclass(frozen=True, slots=True)
class RequestedMethod:
    """One method of a request, with the options written behind its name."""

    name: str
    options: dict[str, str]


def parse(request: str) -> tuple[RequestedMethod, ...]:
    """``name``, ``name:key=value,key=value`` and compositions ``a+b``. Raises
    KvlatheError where it cannot be read."""
    parts = request.split("+")
    return tuple(_parse_one(part.strip()) for part in parts)


def _parse_one(text: str) -> RequestedMethod:
    name, _, tail = text.partition(":")
    pairs = [pair.partition("=") for pair in tail.split(",")] if tail else []
    if not name or any(
        not key or not equals or not value for key, equals, value in pairs
    ):
        raise KvlatheError(
            f"the compression {text!r} cannot be read",
            "it is not name:key=value,key=value",
            "write for example name or name:key=1",
        )
    options = {key.strip(): value.strip() for key, _, value in pairs}
    if len(options) < len(pairs):
        raise KvlatheError(
            f"the compression {text!r} cannot be read",
            "it has an option twice",
            "keep one of them",
        )
    return RequestedMethod(name.strip().lower(), options)


def with_written(options: Options, written: dict[str, str]) -> Options:
    """``options`` overruled by those written in the request. Raises KvlatheError for
    unknown names and unreadable values.
    """
    known = [option.name for option in dataclasses.fields(Options)]
    values = {
        key: _value(key, text) for key, text in known_only(written, known).items()
    }
    return options.asked(**values) if values else options


def known_only(written: dict[str, str], known: Iterable[str]) -> dict[str, str]:
    """``written``. Raises KvlatheError where it has an option that is not ``known``."""
    known = list(known)
    for key in written:
        if key not in known:
            raise unknown(f"the option {key!r}", key, known)
    return written


def chosen(
    written: dict[str, str], choices: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The first of each option's ``choices``, or the one that was written. Raises
    KvlatheError for any other."""
    values = {name: allowed[0] for name, allowed in choices.items()}
    for key, text in known_only(written, choices).items():
        spelled = {str(choice): choice for choice in choices[key] if choice is not None}
        if text not in spelled:
            raise unknown(f"{key} {text!r}", text, spelled)
        values[key] = spelled[text]
    return values


def _value(key: str, text: str) -> object:
    if key in CHOICES:
        return text
    if key == "centre":
        if text not in ("true", "false"):
            raise KvlatheError(
                f"{key}={text} cannot be used",
                "it is a yes or no",
                "write true or false",
            )
        return text == "true"
    try:
        return float(text)
    except ValueError:
        raise KvlatheError(
            f"{key}={text} cannot be used",
            "it is not a number",
            "write a fraction such as 0.2",
        ) from None


def unknown(what: str, given: str, known: Iterable[str]) -> KvlatheError:
    """A refusal that lists what there is and guesses what was meant."""
    known = list(known)
    near = difflib.get_close_matches(str(given), known, 1, 0.5)
    guess = f"Did you mean {near[0]}? " if near else ""
    remedy = f"{guess}Choose one of {', '.join(known)}"
    return KvlatheError(f"{what} is unknown", remedy=remedy)
