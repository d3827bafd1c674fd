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
from kvlathe.plan.formats import Format
from kvlathe.plan.heads import RANK_MULTIPLE
from kvlathe.plan.lives import SEAL, Life, Window

Array = npt.NDArray[np.floating]
Places = npt.NDArray[np.int64]

GROUP = 128
"""Channels in a group along the rank: heads up to this size have one a token. Along the
tokens a page is one."""
SPAN = {"rank": {8: 1.0, 4: 0.95, 2: 0.65}, "token": {8: 1.0, 4: 1.0, 2: 0.8}}
"""The part of a group's range that codes cover. Along the rank: least squared error for 64 to
128 normal numbers; rotated ones nearly are that. A channel's numbers in a page have fewer
outliers; theirs were measured on calibration text.
"""


@dataclass(frozen=True, slots=True)
class SideFormat:
    """Bits and axis of one side's codes."""

    bits: Literal[8, 4, 2]
    axis: Literal["rank", "token"]

    @property
    def span(self) -> float:
        return SPAN[self.axis][self.bits]

    @property
    def stored(self) -> Format:
        """As a page holds it."""
        return Format(self.bits, self.axis, GROUP, self.span)


FORMATS = tuple(
    SideFormat(bits, axis) for axis in ("rank", "token") for bits in (8, 4, 2)
)
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

    @cached_property
    def options(self) -> list[tuple[int, SideFormat]]:
        most = allocate.whole(self.stats.shape.head_dim)
        ranks = range(RANK_MULTIPLE, most + 1, RANK_MULTIPLE)
        return list(itertools.product(ranks, FORMATS))

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
        """Lives that a lane may have: all tokens stay, or the windows that are smaller."""
        page = self.page_tokens
        sink = _whole_pages(SINK, page)
        windows = [Window(sink, _whole_pages(newest, page)) for newest in NEWEST]
        fitting = [life for life in windows if life.most < self.tokens // page * page]
        return [SEAL, *(fitting if self.windowed else ())]

    @property
    def windows(self) -> list[Life]:
        """Those of ``lives`` that see less than all tokens."""
        return [life for life in self.lives if life.sees.is_less]

    @cached_property
    def pages(self) -> Places:
        """Full pages that each of ``lives`` holds of the sequence."""
        page = self.page_tokens
        whole = self.tokens // page * page
        return np.array([life.kept(whole) for life in self.lives]) // page

    @cached_property
    def bytes(self) -> Places:
        """Bytes of one side of a lane in each life, [options, lives]."""
        sealed = np.outer(self.sizes, self.pages)
        numbers = np.array([rank for rank, _ in self.options]) * self.page_tokens
        return sealed + (numbers * self.hot_bits // 8)[:, None]

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
