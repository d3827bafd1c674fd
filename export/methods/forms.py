"""The forms that a lane of a plan chosen by measurement may take: a rank and a number
format for its K and for its V, and a window of tokens for both."""

from __future__ import annotations

import itertools
from collections.abc import Callable
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
from kvlathe.plan.lives import SEAL, Life, SealAfter, Window

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


@dataclass(frozen=True)
class Cut:
    """One side of one lane cut to a rank and turned: stored as (x - centre) into, read
    through ``back`` [d, rank]."""

    into: Array
    back: Array
    centre: Array


@dataclass(frozen=True, eq=False)
class Grid:
    """Every form that a lane may take: option i of a side is a rank and a format, and
    both sides see the same window. Bytes are those of a sequence of ``tokens`` tokens,
    its hot page in ``hot_bits`` a number counted; ``windowed``: whether lanes may have
    windows.
    """

    stats: Stats
    page_tokens: int
    seed: int
    tokens: int
    hot_bits: int = 16
    windowed: bool = True

    @property
    def ranks(self) -> range:
        """The whole one comes last."""
        most = allocate.whole(self.stats.shape.head_dim)
        return range(RANK_MULTIPLE, most + 1, RANK_MULTIPLE)

    @cached_property
    def options(self) -> list[tuple[int, SideFormat]]:
        return list(itertools.product(self.ranks, FORMATS))

    @cached_property
    def _rotation(self) -> Rotation:
        return by_kind(self.stats, balanced_rotation)

    @cached_property
    def sizes(self) -> Places:
        """Bytes of one side of a lane in a sealed page, [options]."""
        sizes = []
        for rank, form in self.options:
            sizes.append(form.stored.page_bytes(rank, self.page_tokens))
        return np.array(sizes)

    @cached_property
    def lives(self) -> list[Life]:
        """Lives that a lane may have: all tokens stay, the first ones coded like the others
        or as they are, or the windows that are smaller."""
        if not self.windowed:
            return [SEAL]
        page = self.page_tokens
        sink = _whole_pages(SINK, page)
        windows = [Window(sink, _whole_pages(newest, page)) for newest in NEWEST]
        whole = self.tokens // page * page
        fitting = [life for life in windows if life.most < whole]
        return [SEAL, *([SealAfter(sink)] if sink < whole else []), *fitting]

    @property
    def whole_first(self) -> Places:
        """[lives]: 1 where the first tokens are never coded, else 0."""
        return np.array([int(life.stay_hot > 0) for life in self.lives])

    @property
    def windows(self) -> list[Life]:
        """Those of ``lives`` that see less than all tokens."""
        return [life for life in self.lives if life.sees.is_less]

    @cached_property
    def pages(self) -> Places:
        """Coded pages that each of ``lives`` holds of the sequence."""
        page = self.page_tokens
        whole = self.tokens // page * page
        return self._held(lambda life: life.kept(whole) - life.stay_hot)

    def _held(self, tokens: Callable[[Life], int]) -> Places:
        return np.array([tokens(life) for life in self.lives]) // self.page_tokens

    @cached_property
    def bytes(self) -> Places:
        """Bytes of one side of a lane in each life, [options, lives]."""
        sealed = np.outer(self.sizes, self.pages)
        numbers = np.array([rank for rank, _ in self.options]) * self.page_tokens
        hot = 1 + self._held(lambda life: life.stay_hot)
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
