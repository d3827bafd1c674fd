"""Number formats of cached tokens: what K or V of one lane costs, and in which order.

A ``Format`` answers every question about how numbers are stored; other modules ask it
and compare no bits themselves. Its numpy form, encode and decode, is
kvlathe/plan/codec.py. This module imports the standard library alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Bits = Literal[32, 16, 8, 4, 3, 2]
Axis = Literal["rank", "token"]
Levels = Literal["even", "normal"]
Side = Literal["k", "v"]

ALIGN = 128
"""Every part of a page begins at a multiple of so many bytes."""
NAMES: dict[Bits, str] = {32: "f32", 16: "f16", 8: "u8", 4: "u4", 3: "u3", 2: "u2"}
"""Every number of bits that a format may have, and what it is called."""
META_BYTES = 4
"""Of one quantization group of even levels: its scale and its minimum, IEEE halves."""
NORMAL: dict[Bits, tuple[int, ...]] = {
    2: (0, 89, 166, 255),
    3: (0, 48, 83, 113, 142, 172, 207, 255),
    4: (0, 31, 52, 69, 84, 97, 109, 122, 133, 146, 158, 171, 186, 203, 224, 255),
}
"""Levels that lose least of a normal number (Lloyd 1982, Max 1960), for each number of
bits: in 255 parts of the range that they span, so that products take them as bytes."""
NORMAL_TOP: dict[Bits, float] = {2: 1.5104176, 3: 2.1519457, 4: 2.7325896}
"""The largest level, in standard deviations."""


def aligned(size: int) -> int:
    """The least multiple of ALIGN that holds ``size`` bytes."""
    return -(-size // ALIGN) * ALIGN


def groups_along_rank(rank: int, group: int) -> tuple[int, ...]:
    """Sizes of the quantization groups of ``rank`` channels: one, or near-equal
    multiples of 16 up to ``group``."""
    count = -(-rank // group)
    steps, extra = divmod(rank // 16, count)
    return tuple(16 * (steps + (i < extra)) for i in range(count))


def sum_bytes(bits: int, group: int) -> int:
    """Bytes that hold the sum of ``group`` codes of ``bits`` bits."""
    most_bits = bits + math.ceil(math.log2(group))
    return -(-most_bits // 8)


@dataclass(frozen=True, slots=True)
class Format:
    """How K or V of one lane is stored: as IEEE numbers, or in codes.

    IEEE numbers (16 and 32 bits) lie [token][rank]. Codes of fewer bits come in groups
    of ``group`` elements along ``axis``, each group with one (scale, minimum) pair:
    [token][rank] where groups run along the rank, [rank][token] where they run along
    the tokens of a page. Codes of 3 bits lie in blocks of three runs of bytes, others
    in one run (kvlathe/plan/codec.py). ``span``: the middle part of a group's range that codes cover.
    ``sums``: the sum of each group's codes is stored, too. IEEE numbers have no groups,
    and ignore all five.

    ``levels``: ``even`` ones between a group's minimum and its maximum, or those of a
    ``normal`` number around 0 (NORMAL): a group then has one scale and no minimum.
    """

    bits: Bits
    axis: Axis
    group: int
    span: float = 1.0
    sums: bool = False
    levels: Levels = "even"

    @property
    def name(self) -> str:
        """For example ``u4``; ``n4`` where levels are the normal's."""
        if self.has_fixed_levels:
            return f"n{self.bits}"
        return NAMES[self.bits]

    @property
    def words(self) -> str:
        """For people."""
        if self.has_fixed_levels:
            return f"{self.bits} bit (normal)"
        return f"{self.bits} bit"

    @property
    def is_coded(self) -> bool:
        """Whether elements are codes that a group's scale and minimum give sense to."""
        return self.bits < 16

    @property
    def along_rank(self) -> bool:
        """Codes whose groups lie within one token."""
        return self.is_coded and self.axis == "rank"

    @property
    def along_tokens(self) -> bool:
        """Codes whose groups hold one channel of several tokens."""
        return self.is_coded and self.axis == "token"

    @property
    def token_major(self) -> bool:
        """Whether each token's bytes are contiguous, so that single tokens can move."""
        return not self.along_tokens

    @property
    def has_fixed_levels(self) -> bool:
        """Whether codes are numbers of a level table, with one scale a group."""
        if not self.is_coded:
            return False
        return self.levels == "normal"

    @property
    def table(self) -> tuple[int, ...]:
        """What each code is worth, in units of the group's scale above its minimum."""
        if self.has_fixed_levels:
            return NORMAL[self.bits]
        count = 1 << self.bits
        return tuple(range(count))

    @property
    def top(self) -> int:
        """What the largest code is worth."""
        return self.table[-1]

    @property
    def runs(self) -> int:
        """Runs of bytes that codes are divided among: one byte of each holds
        ``together`` codes."""
        return 3 if self.bits == 3 else 1

    @property
    def together(self) -> int:
        """Codes in one byte of each run."""
        bits = 8 * self.runs
        return bits // self.bits

    @property
    def halves(self) -> int:
        """IEEE halves of one group's metadata: its scale and its minimum, or the
        magnitude of its outermost levels."""
        return 1 if self.has_fixed_levels else 2

    @property
    def group_bytes(self) -> int:
        """Bytes of one group's metadata."""
        return 2 * self.halves

    @property
    def pool(self) -> str:
        """The typed view of the cache in which the elements are read."""
        return {32: "pool_f32", 16: "pool_f16"}.get(self.bits, "pool_u8")

    @property
    def pools(self) -> frozenset[str]:
        """All views that are read: metadata is halves."""
        if self.is_coded:
            return frozenset((self.pool, "pool_f16"))
        return frozenset((self.pool,))

    @property
    def sum_bytes(self) -> int:
        """Bytes of one group's stored sum."""
        return sum_bytes(self.bits, self.group)

    def element_bytes(self, count: int) -> int:
        """Bytes of ``count`` elements, without metadata."""
        return count * self.bits // 8

    def group_sizes(self, rank: int, tokens: int) -> tuple[int, ...]:
        """Sizes of the groups along the axis, in a page of ``tokens`` tokens; empty
        where there are none."""
        if self.along_rank:
            return groups_along_rank(rank, self.group)
        if not self.is_coded:
            return ()
        firsts = range(0, tokens, self.group)
        return tuple(min(self.group, tokens - first) for first in firsts)

    def group_count(self, rank: int, tokens: int) -> int:
        """Groups of one lane in a page of ``tokens`` tokens."""
        rows = tokens if self.axis == "rank" else rank
        return rows * len(self.group_sizes(rank, tokens))

    def data_bytes(self, rank: int, tokens: int) -> int:
        """Bytes of one lane's elements in a page, aligned."""
        return aligned(self.element_bytes(rank * tokens))

    def meta_bytes(self, rank: int, tokens: int) -> int:
        """Bytes of one lane's metadata in a page, stored sums included, each aligned.
        The sums lie behind the rest."""
        count = self.group_count(rank, tokens)
        sums = aligned(count * self.sum_bytes) if self.sums else 0
        return aligned(count * self.group_bytes) + sums

    def page_bytes(self, rank: int, tokens: int) -> int:
        """Bytes of one lane's K or V in a page of ``tokens`` tokens."""
        data = self.data_bytes(rank, tokens)
        meta = self.meta_bytes(rank, tokens)
        return data + meta


@dataclass(frozen=True, slots=True)
class Tier:
    """The formats of K and of V, and how they are computed.

    ``bits_*``, ``axis_*``, ``group_*``, ``span_*``, ``levels_*`` and ``sums`` are the
    fields of the two formats, which ``k`` and ``v`` return.
    ``arithmetic`` = int: QK^T and PV are taken on the codes, nothing is dequantized.
    K's groups then run along the rank, which the product sums over; V's along the
    tokens. Where tokens may be dropped, V's run along the rank too, and their scales go
    into the shares (export/attention/integer.py).
    ``rounding``: codes to the nearest, or ``stochastic``: up or down by a hash of the
    plan's seed, the lane, the token's position and the channel (kvlathe/plan/codec.py).
    That has no bias, and is the same however often it is done.
    ``span_*`` below 1: coarse codes err less, because a group's ends are rare
    (docs/auto.md).
    ``sums``: integer products then need no symmetry of the other side
    (export/attention/integer.py).
    """

    bits_k: Bits
    bits_v: Bits
    axis_k: Axis = "rank"
    axis_v: Axis = "token"
    group_k: int = 64
    group_v: int = 64
    arithmetic: Literal["float", "int"] = "float"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    sums: bool = False
    span_k: float = 1.0
    span_v: float = 1.0
    levels_k: Levels = "even"
    levels_v: Levels = "even"

    @property
    def k(self) -> Format:
        shape = self.bits_k, self.axis_k, self.group_k
        return Format(*shape, self.span_k, self.sums, self.levels_k)

    @property
    def v(self) -> Format:
        shape = self.bits_v, self.axis_v, self.group_v
        return Format(*shape, self.span_v, self.sums, self.levels_v)

    def of(self, side: str) -> Format:
        """The format of K or of V: ``side`` is "k" or "v"."""
        return self.k if side == "k" else self.v

    @property
    def formats(self) -> tuple[Format, Format]:
        return self.k, self.v

    @property
    def is_coded(self) -> bool:
        """Whether K or V is stored in codes."""
        return self.k.is_coded or self.v.is_coded

    @property
    def widest(self) -> int:
        """The larger number of bits."""
        return max(self.bits_k, self.bits_v)
