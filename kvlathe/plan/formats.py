"""Number formats of cached tokens: what K or V of one lane costs, and in which order.

A ``Format`` answers every question about how numbers are stored; other modules ask it
and compare no bits themselves. Its numpy form, encode and decode, is
kvlathe/plan/codec.py. This module imports the standard library alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Bits = Literal[32, 16, 8, 4, 3, 2]
Axis = Literal["rank", "token"]
Coding = Literal["affine", "normal", "float8"]

ALIGN = 128
"""Every part of a page begins at a multiple of so many bytes."""
NAMES: dict[Bits, str] = {32: "f32", 16: "f16", 8: "u8", 4: "u4", 3: "u3", 2: "u2"}
"""Every number of bits that a format may have, and what it is called."""
META_BYTES = 4
"""Bytes of an affine group's metadata: its scale and its minimum, IEEE halves."""
WHOLE_RANK = 1 << 12
"""Channels of a group that is all of a token's: more than any head has."""
NORMAL: dict[Bits, tuple[int, ...]] = {
    2: (0, 89, 166, 255),
    3: (0, 48, 83, 113, 142, 172, 207, 255),
    4: (0, 31, 52, 69, 84, 97, 109, 122, 133, 146, 158, 171, 186, 203, 224, 255),
}
"""Levels that lose least of a normal number (Lloyd 1982, Max 1960), for each number of
bits: in 255 parts of the range that they span, so that products take them as bytes."""
NORMAL_TOP: dict[Bits, float] = {2: 1.5104176, 3: 2.1519457, 4: 2.7325896}
"""The largest level, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """A coding's record: its codes become numbers so.

        x = scale * worth[code] + minimum

    ``worth`` makes the table of what each code is worth. A group's scale is ``step``
    times the first half of its metadata. Its minimum is the second half or, where
    ``has_minimum`` is false, ``lowest`` times the first. ``is_whole``: codes are worth
    whole numbers from 0 to 255, which products of integers take. ``widths`` are the
    bits that codes may have. ``axis_number`` is that of a coding whose groups run along
    the rank alone (kvlathe_axis of abi.h); ``has_one_group``: a token then has one
    (WHOLE_RANK). ``letter`` and ``note`` name its formats.
    """

    letter: str
    note: str
    widths: tuple[Bits, ...]
    worth: Callable[[Bits], tuple[float, ...]]
    has_minimum: bool = False
    step: float = 1.0
    lowest: float = 0.0
    is_whole: bool = True
    axis_number: int | None = None
    has_one_group: bool = False


def _themselves(bits: Bits) -> tuple[int, ...]:
    return tuple(range(1 << bits))


def _e4m3(bits: Bits) -> tuple[float, ...]:
    """A sign, 4 bits of exponent with the bias 7 and 3 of the mantissa. The last code
    of either sign is no number, and is never written; there are no infinities."""
    positive: list[float] = []
    for code in range(1 << bits - 1):
        exponent, mantissa = divmod(code, 8)
        whole = mantissa + 8 * (exponent > 0)
        positive.append(math.ldexp(whole, max(exponent, 1) - 10))
    positive[-1] = math.nan
    return (*positive, *(-x for x in positive))


DECODINGS: dict[Coding, Decoding] = {
    "affine": Decoding("u", "", (8, 4, 3, 2), _themselves, has_minimum=True),
    "normal": Decoding(
        "n",
        " (normal)",
        (4, 3, 2),
        NORMAL.__getitem__,
        step=2 / 255,
        lowest=-1.0,
        axis_number=2,
    ),
    "float8": Decoding(
        "f",
        " (float)",
        (8,),
        _e4m3,
        is_whole=False,
        axis_number=3,
        has_one_group=True,
    ),
}
"""Every coding. ``affine``: levels lie evenly between a group's minimum and its
maximum. ``normal``: levels are those of a normal number around 0 (NORMAL). ``float8``:
codes are 8-bit floats, E4M3 of the OCP 8-bit Floating Point Specification (2023)."""
AXES: tuple[Axis, ...] = ("rank", "token")
"""By their number in the layer table (kvlathe_axis of abi.h)."""


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
    return -(-(bits + math.ceil(math.log2(group))) // 8)


@dataclass(frozen=True, slots=True)
class Format:
    """The form in which K or V of one lane is stored: IEEE numbers, or codes.

    IEEE numbers (16 and 32 bits) lie [token][rank]. Codes of fewer bits come in groups
    of ``group`` elements along ``axis``, each group with a scale and, in some codings,
    a minimum: [token][rank] where groups run along the rank, [rank][token] where they
    run along the tokens of a page. Codes of 3 bits lie in blocks of three runs of
    bytes, others in one run (kvlathe/plan/packing.py). ``span``: the middle part of a
    group's range that affine codes cover. ``sums``: the sum of each group's codes is
    stored, too. ``coding``: how a code becomes a number (DECODINGS). IEEE numbers have
    no groups, and ignore all five.
    """

    bits: Bits
    axis: Axis
    group: int
    span: float = 1.0
    sums: bool = False
    coding: Coding = "affine"

    @property
    def name(self) -> str:
        """For example ``u4``; ``n4`` where levels are the normal's, ``f8`` of
        floats."""
        if self.is_coded:
            return f"{self.decoding.letter}{self.bits}"
        return NAMES[self.bits]

    @property
    def words(self) -> str:
        """For people."""
        note = self.decoding.note if self.is_coded else ""
        return f"{self.bits} bit{note}"

    @property
    def is_coded(self) -> bool:
        """Whether elements are codes that a group's metadata gives sense to."""
        return self.bits < 16

    @property
    def is_half(self) -> bool:
        """Whether elements are IEEE halves."""
        return self.bits == 16

    @property
    def decoding(self) -> Decoding:
        """The record of the coding."""
        return DECODINGS[self.coding]

    @property
    def is_possible(self) -> bool:
        """Whether codes of this width and axis can be decoded as ``coding`` says."""
        if not self.is_coded:
            return True
        own_axis = self.decoding.axis_number is None or self.axis == "rank"
        own_group = not self.decoding.has_one_group or self.group == WHOLE_RANK
        return own_axis and own_group and self.bits in self.decoding.widths

    @property
    def axis_number(self) -> int:
        """The axis of the layer table (kvlathe_axis of abi.h)."""
        number = self.decoding.axis_number if self.is_coded else None
        return AXES.index(self.axis) if number is None else number

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
    def has_minimum(self) -> bool:
        """Whether a group of codes has a minimum beside its scale."""
        return self.is_coded and self.decoding.has_minimum

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds several codes."""
        return self.bits < 8

    @property
    def needs_table(self) -> bool:
        """Whether a byte must be looked up: it is not one code that is worth itself."""
        return self.is_packed or self.decoding.worth is not _themselves

    @property
    def table(self) -> tuple[float, ...]:
        """The number that each code stands for, in units of the group's scale above its
        minimum."""
        return self.decoding.worth(self.bits)

    @property
    def top(self) -> float:
        """The number that the largest code stands for."""
        return max(filter(math.isfinite, self.table))

    @property
    def runs(self) -> int:
        """Runs of bytes that codes are divided among: one byte of each holds
        ``together`` codes."""
        return 3 if self.bits == 3 else 1

    @property
    def together(self) -> int:
        """Codes in one byte of each run."""
        return 8 * self.runs // self.bits

    @property
    def halves(self) -> int:
        """IEEE halves of one group's metadata: its scale and, where it has one, its
        minimum."""
        return 2 if self.has_minimum else 1

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

    @property
    def unit_bytes(self) -> int:
        """Bytes of an element, or of what holds codes of fewer bits."""
        return max(1, self.bits // 8)

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
        return self.data_bytes(rank, tokens) + self.meta_bytes(rank, tokens)


@dataclass(frozen=True, slots=True)
class Tier:
    """The formats of K and of V, and how they are computed.

    ``bits_*``, ``axis_*``, ``group_*``, ``span_*``, ``coding_*`` and ``sums`` are the
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
    coding_k: Coding = "affine"
    coding_v: Coding = "affine"

    @property
    def k(self) -> Format:
        shape = self.bits_k, self.axis_k, self.group_k
        return Format(*shape, self.span_k, self.sums, self.coding_k)

    @property
    def v(self) -> Format:
        shape = self.bits_v, self.axis_v, self.group_v
        return Format(*shape, self.span_v, self.sums, self.coding_v)

    def of(self, side: str) -> Format:
        """The format of K or of V: ``side`` is "k" or "v"."""
        return self.k if side == "k" else self.v

    @property
    def formats(self) -> tuple[Format, Format]:
        return self.k, self.v

    @property
    def has_one_form(self) -> bool:
        """Whether K and V are written alike."""
        if self.is_coded:
            return self.k == self.v
        return self.bits_k == self.bits_v

    @property
    def is_coded(self) -> bool:
        """Whether K or V is stored in codes."""
        return self.k.is_coded or self.v.is_coded

    @property
    def widest(self) -> int:
        """The larger number of bits."""
        return max(self.bits_k, self.bits_v)
