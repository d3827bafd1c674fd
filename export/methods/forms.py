"""The forms that a lane of a plan chosen by measurement may take: a rank and a number
format for its K and for its V, and a window of tokens for both."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvlathe.export.bases import allocate
from kvlathe.export.bases.hadamard import hadamard
from kvlathe.export.bases.rotation import (
    Rotation,
    balanced_basis,
    balanced_rotation,
    by_kind,
)
from kvlathe.export.calibration.stats import Stats
from kvlathe.plan.formats import Coding, Format
from kvlathe.plan.heads import RANK_MULTIPLE
from kvlathe.plan.lives import SEAL, Age, Life, Paging, SealAfter, Window
from kvlathe.plan.sight import NO_END

Array = npt.NDArray[np.floating]
Places = npt.NDArray[np.int64]

GROUP = 128
"""Channels in a group along the rank: heads up to this size have one a token. Along the
tokens a page is one."""
SPAN = {
    "rank": {8: 1.0, 4: 0.95, 3: 0.85, 2: 0.65},
    "token": {8: 1.0, 4: 1.0, 3: 0.95, 2: 0.8},
}
"""The part of a group's range that codes cover. Along the rank: least squared error for 64 to
128 normal numbers; rotated ones nearly are that. A channel's numbers in a page have fewer
outliers; theirs were measured on calibration text.
"""


@dataclass(frozen=True, slots=True)
class SideFormat:
    """Bits and axis of one side's codes."""

    bits: Literal[8, 4, 3, 2]
    axis: Literal["rank", "token"]
    coding: Coding = "affine"

    @property
    def span(self) -> float:
        return 1.0 if self.coding == "normal" else SPAN[self.axis][self.bits]

    @property
    def stored(self) -> Format:
        """As a page holds it."""
        return Format(self.bits, self.axis, GROUP, self.span, coding=self.coding)


FORMATS = (
    *(SideFormat(bits, "rank") for bits in (8, 4, 2)),
    *(SideFormat(bits, "token") for bits in (8, 4, 3, 2)),
    *(SideFormat(bits, "rank", "normal") for bits in (3, 2)),
)
OF_KEYS = tuple(form for form in FORMATS if form.coding == "affine")
"""K keeps a minimum: it holds what all tokens of a lane share."""
OF_VALUES = tuple(
    form
    for form in FORMATS
    if form.axis == "token" or form.coding == "normal" or form.bits == 4
)
"""V takes fixed levels, or 4 bits, along the rank: two bytes a token less than a minimum."""
PAIRS = tuple(
    (SideFormat(bits, "rank"), SideFormat(bits, "token")) for bits in (8, 4, 2)
)
"""K's and V's format of a lane, where kernels read no others."""
SINK = 64
"""First tokens that every window keeps: what later ones attend to by default (StreamingLLM,
Xiao et al. 2023, arXiv 2309.17453)."""
NEWEST = (128, 256, 512, 1024, 2048, 4096)
"""Tokens that windows keep beside those: up to half the longest sequence that windows are
priced on (export/search/measured.py), which says nothing of longer ones."""


AGES = (128, 256, 512)
"""Newest tokens that may have more bits than older ones."""
PLAIN = tuple((form, form) for form in range(len(FORMATS)))
AGED = tuple(
    (young, old)
    for young, old in itertools.permutations(range(len(FORMATS)), 2)
    if FORMATS[young].bits > FORMATS[old].bits
)
FORMS = PLAIN + AGED
"""Codes of one side of a lane, places in FORMATS: of newest tokens (and the first ones), and
of older ones."""


@dataclass(frozen=True)
class Part:
    """Some tokens of the pages before a query's own: from token ``skip`` on, the ``sink``
    first and those that are more than ``near`` and at most ``far`` tokens before its
    page, whole pages."""

    skip: int = 0
    sink: int = 0
    near: int = 0
    far: int = NO_END

    def is_some(self) -> bool:
        """Whether it has tokens beside the first ones."""
        return self.near < self.far


NEAR = 512
"""Tokens before a query's page whose codes are priced on short readings. What codes of
others lose is priced on long ones: there are more of them (docs/history/auto.md)."""


def parts_of(life: Life, first: int) -> list[list[Part]]:
    """The parts that a life has in each of its cold tiers, near and distant; ``first``:
    first tokens of any sequence, apart from those that are distant."""
    young, far = life.newest_apart, life.reaches.recent
    head = Part(life.stay_hot, first, 0, min(young or far, NEAR))
    tiers = [[head], [Part(first, 0, young, min(far, NEAR))]] if young else [[head]]
    tiers[-1].append(Part(first, 0, NEAR, far))
    return [list(filter(Part.is_some, tier)) for tier in tiers]


@dataclass(frozen=True)
class Cut:
    """One side of one lane cut to a rank and turned: stored as (x - centre) into, read
    through ``back`` [d, rank]."""

    into: Array
    back: Array
    centre: Array


@dataclass(frozen=True, eq=False)
class Grid:
    """Every form that a lane may take: option i of a side is a rank and one of FORMS, and
    both sides have the same life. Bytes are those of a sequence of ``tokens`` tokens,
    its hot page in ``hot_bits`` a number counted; ``windowed``: whether lanes may have
    windows; ``aged``: whether newest tokens may have more bits than older ones.
    """

    stats: Stats
    page_tokens: int
    seed: int
    tokens: int
    hot_bits: int = 16
    windowed: bool = True
    aged: bool = True

    @property
    def ranks(self) -> range:
        """The whole one comes last."""
        most = allocate.whole(self.stats.shape.head_dim)
        return range(RANK_MULTIPLE, most + 1, RANK_MULTIPLE)

    @cached_property
    def options(self) -> list[tuple[int, int]]:
        """Ranks, and places in FORMS."""
        return list(itertools.product(self.ranks, range(len(FORMS))))

    @cached_property
    def _rotation(self) -> Rotation:
        return by_kind(self.stats, balanced_rotation)

    @cached_property
    def sizes(self) -> Places:
        """Bytes of one side of a lane in a sealed page of the young and of the old tier,
        [2, options]."""
        sizes = np.empty((2, len(self.options)), np.int64)
        for place, (rank, form) in enumerate(self.options):
            for tier, code in enumerate(FORMS[form]):
                stored = FORMATS[code].stored
                sizes[tier, place] = stored.page_bytes(rank, self.page_tokens)
        return sizes

    @cached_property
    def lives(self) -> list[Life]:
        """Lives that a lane may have: all tokens stay, the first ones coded like the others
        or as they are, or the windows that are smaller; then all of them and the windows
        again, with older tokens apart."""
        if not self.windowed:
            return [SEAL]
        page = self.page_tokens
        sink = _whole_pages(SINK, page)
        windows = [Window(sink, _whole_pages(newest, page)) for newest in NEWEST]
        whole = self.tokens // page * page
        fitting = [life for life in windows if life.most < whole]
        first = [SealAfter(sink)] if sink < whole else []
        lives: list[Life] = [SEAL, *first, *fitting]
        reaches = [NO_END, *(life.recent for life in fitting)]
        for young in AGES if self.aged else ():
            newest = _whole_pages(young, page)
            lives += [
                Age(0, newest, sink, recent)
                for recent in reaches
                if sink + newest < min(recent, whole)
            ]
        return lives

    @cached_property
    def windows(self) -> list[Life]:
        """Those of ``lives`` that see less than all tokens, once for each window."""
        by_sight = {life.reaches: life for life in reversed(self.lives) if life.drops}
        return list(reversed(by_sight.values()))

    def by_life(self, of_windows: Array) -> Array:
        """[lanes, windows] -> [lanes, lives], 0 where all tokens are kept."""
        places = {life.reaches: place for place, life in enumerate(self.windows)}
        nothing = np.zeros((len(of_windows), 1))
        every = np.concatenate([of_windows, nothing], 1)
        return every[:, [places.get(life.reaches, -1) for life in self.lives]]

    def parts_of(self, life: Life) -> list[list[Part]]:
        """The parts that one of ``lives`` has in each of its cold tiers."""
        return parts_of(life, _whole_pages(SINK, self.page_tokens))

    def _parts(self, distant: bool) -> list[Part]:
        found: dict[Part, None] = {}
        for life in self.lives:
            for part in itertools.chain(*self.parts_of(life)):
                if (part.near >= NEAR) == distant:
                    found[part] = None
        return list(found)

    @cached_property
    def parts(self) -> list[Part]:
        """The near ones of all lives, each once."""
        return self._parts(distant=False)

    @cached_property
    def distant_parts(self) -> list[Part]:
        """The distant ones."""
        return self._parts(distant=True)

    @cached_property
    def pages(self) -> Places:
        """Coded pages of either tier that each of ``lives`` holds of the sequence, those
        that wait too: [2, lives]."""
        counts: list[tuple[int, int]] = []
        for life in self.lives:
            at = Paging(self.page_tokens, life.cold_tiers[-1])
            _, young, *old = life.written(at.whole(self.tokens), at)
            counts.append((young, sum(old)))
        return np.array(counts).T // self.page_tokens

    @cached_property
    def bytes(self) -> Places:
        """Bytes of one side of a lane in each life, [options, lives]."""
        sealed = self.sizes.T @ self.pages
        numbers = np.array([rank for rank, _ in self.options]) * self.page_tokens
        stay = [life.stay_hot // self.page_tokens for life in self.lives]
        hot = 1 + np.array(stay)
        return sealed + np.outer(numbers * self.hot_bits // 8, hot)

    @cached_property
    def _values(self) -> Array:
        """[L, H, d, d] of V around its mean, computed once for all cuts."""
        return self.stats.whole.second("v", self.stats.shape.shifts)

    def cut(self, side: str, layer: int, head: int, rank: int) -> Cut:
        """``side`` "k" or "v" of a lane at a rank. V is also turned into the axes in
        which stored values and their readers have equal variances."""
        bases = self._rotation
        at = (layer, head)
        rng = np.random.default_rng((self.seed, layer, head, int(side == "v")))
        d = self.stats.shape.heads(layer).head_dim
        dims = min(rank, d)
        turn = hadamard(rank, rng)[:dims]
        if side == "k":
            into = bases.b[at][:d, :dims]
            back = bases.a[at][:d, :dims]
            return Cut(into @ turn, back @ turn, bases.centre_k[at][:d])
        into = bases.a_v[at][:d, :dims]
        back = bases.o_v[at][:dims, :d].T
        readers = self.stats.wo_gram[at][:d, :d]
        stored = into.T @ self._values[at][:d, :d] @ into  # [rank, rank]
        axes = balanced_basis(stored, back.T @ readers @ back)
        into = into @ axes.into @ turn
        back = back @ axes.back @ turn
        return Cut(into, back, bases.centre_v[at][:d])


def _whole_pages(tokens: int, page: int) -> int:
    """Rounded up."""
    return -(-tokens // page) * page
