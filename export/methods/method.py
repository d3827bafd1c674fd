"""A method as a value (Method), and its answer (Decision)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from kvlathe.export.bases.basis import Basis
from kvlathe.export.bases.rotation import Rotation
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.options import (
    MethodOptions,
    Option,
    RankOptions,
    options_of,
)
from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.lives import Life
from kvlathe.plan.plan_data import Fields
from kvlathe.plan.stages import Stage
from kvlathe.plan.token_score import TokenScore

Scales = Literal["", "k", "v", "kv"]
"""Whose channels are divided by a factor each (channels.py)."""
Hadamard = Literal["auto", "none", "k", "v", "kv"]
"""The side that gets a Hadamard rotation before it is quantized (hadamard.py): ``auto``
where groups run along the rank and it costs nothing."""


Turn = Callable[[Stats, int], Basis]
"""Bases of all lanes, of which no dim is cut, from statistics and a seed."""


@dataclass(frozen=True)
class Decision:
    """The decision of one method. A field that is empty is left to others.

    ``lanes`` with their ``basis``: the ranks. ``cold``: the number format that full
    pages are quantized to; ``cold_of_dropped``: the one in its place where tokens may be
    dropped one by one, if that is another; ``cold_of_shared``: where V is a part of K, and
    both have one form; ``sink``: the first tokens that stay as they
    are where all tokens stay; ``young``: the format of the ``recent`` newest ones there,
    where ``cold`` is that of older ones. ``split``: several of them instead, each with
    its share of the tokens, the most salient first. ``hadamard``, ``scales``: the sides that are
    rotated, or scaled by statistics, before that; ``turn``: what gives whole lanes
    their bases by statistics, first of all (turns.py). ``tokens``: how each lane's
    tokens live, one life for all lanes or one each; ``score``: what they are ranked
    by. ``apart``: whether every lane is a group of its own.
    ``whole_heads``: (layer, head) of lanes that keep all tokens whatever the life.
    ``stages`` of the layers. ``removed``: lanes that are filled from another head, lane
    -> head. ``notes`` are for people.
    """

    lanes: tuple[Lane, ...] | None = None
    basis: Basis = field(default_factory=Basis)
    cold: Tier | None = None
    cold_of_dropped: Tier | None = None
    cold_of_shared: Tier | None = None
    split: tuple[tuple[Tier, float], ...] = ()
    sink: int = 0
    young: Tier | None = None
    recent: int = 0
    hadamard: Hadamard = "none"
    scales: Scales = ""
    turn: Turn | None = None
    tokens: tuple[Life, ...] = ()
    apart: bool = False
    score: TokenScore | None = None
    whole_heads: tuple[tuple[int, int], ...] = ()
    stages: tuple[Stage, ...] = ()
    removed: Mapping[int, int] = field(default_factory=dict)
    notes: Fields = field(default_factory=dict)

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


Source = Literal["random", "text"]
"""The tokens that a calibration runs on."""
Rotate = Callable[[Stats, RankOptions], Rotation]
"""The bases of all lanes that a method which chooses ranks believes in."""
OptionsT = TypeVar("OptionsT", bound=MethodOptions)


def decides_nothing(options: object, page_tokens: int) -> Decision:
    """The ``plan`` of methods that know nothing without statistics."""
    return Decision()


@dataclass(frozen=True, slots=True)
class Method(Generic[OptionsT]):
    """A method as data: a file of this folder has one as METHOD.

    >>> from kvlathe.export.methods.window import METHOD
    >>> METHOD.plan(METHOD.options, 64).tokens  # for pages of 64 tokens
    (Window(kind='window', sink=64, recent=256, exact=0),)

    ``options``: what may be asked of it, with its defaults. ``rotate`` for a method that
    chooses ranks (its options are ``RankOptions``), else ``plan``: (options, tokens of a
    page) -> what is decided without statistics. ``choose``, beside it: (statistics,
    options, tokens of a page, seed) -> what is decided by statistics. ``check`` raises
    KvlatheError for options that no model of a shape can have, before anything is
    calibrated. ``name_heads`` where measured losses decide which heads see everything:
    (options, what the window costs each lane, KV heads of a layer) -> the name and the
    options of the method that names them.

    ``calibration``: what it calibrates on; ``source`` says it where that depends on its
    options. ``measured``: its plans come from measurements of the model
    (export/search/measured.py). ``entropies``: whether it reads those of a calibration.
    """

    summary: str
    options: OptionsT
    rotate: Rotate | None = None
    plan: Callable[[OptionsT, int], Decision] = decides_nothing
    choose: Callable[[Stats, OptionsT, int, int], Decision] | None = None
    check: Callable[[OptionsT, ModelShape], None] | None = None
    name_heads: (
        Callable[[OptionsT, Sequence[float], int], tuple[str, Mapping[str, object]]]
        | None
    ) = None
    calibration: Source | None = None
    source: Callable[[OptionsT], Source | None] | None = None
    measured: bool = False
    entropies: bool = False

    @property
    def sizes(self) -> list[Option]:
        """The options that say how small it makes the cache."""
        return [one for one in options_of(self.options) if one.sizes]
