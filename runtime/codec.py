"""How K or V of one lane is written in a page: the number formats of a Tier, in numpy.

Unquantized parts are IEEE half or single, [token][rank]. Quantized parts hold asymmetric codes,

    x ~ minimum + scale * code,   scale = (max - min) / (2^bits - 1),   one (scale, minimum) pair of halves a group

(max - min is first cut to its middle part where the tier's span is below 1),

as [token][rank] with groups along the rank, or as [rank][token] with groups along the page's tokens. Codes below 8 bit
are packed with the first element in the lowest bits. Metadata follows the order of the groups. The rounding of scale
and minimum to half is part of the code: codes are chosen for the rounded pair. A constant group has scale 0 and is
exact to half. Where a tier stores sums, those of each group's codes follow in the same order, little-endian.

Codes are rounded to the nearest, or up where a hash of the plan's seed, the lane, K or V, the token's position and the
channel (``noise``) falls below the fraction: no bias, no state, the same page from the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.export.layout import META_BYTES, CacheLayout, groups_along_rank, sum_bytes

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Positions = int | npt.NDArray[np.integer]
FLOATS = {16: np.dtype(np.float16), 32: np.dtype(np.float32)}


@dataclass(frozen=True)
class Part:
    """K or V of one lane in the pages of a bucket. ``data`` and ``meta`` are byte offsets from the page's start."""

    data: int
    meta: int
    tokens: int
    rank: int
    bits: int
    axis: str
    groups: tuple[int, ...]  # sizes of the groups along the axis; empty where nothing is quantized
    key: int | None = None  # of this lane's noise; None: codes are rounded to the nearest
    sums: tuple[int, int] | None = None  # byte offset of the groups' sums of codes, and bytes of each
    span: float = 1.0  # of a group's range, what its codes cover

    @property
    def token_major(self) -> bool:
        """Whether each token's bytes (and metadata) are contiguous, so that single tokens can move."""
        return self.bits >= 16 or self.axis == "rank"

    @property
    def fields(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes a token) of what a token-major part holds for each token."""
        if not self.groups:
            return ((self.data, self.rank * self.bits // 8),)
        fields = ((self.data, self.rank * self.bits // 8), (self.meta, len(self.groups) * META_BYTES))
        return fields if self.sums is None else (*fields, (self.sums[0], len(self.groups) * self.sums[1]))

    @cached_property
    def _starts(self) -> npt.NDArray[np.intp]:
        return np.cumsum((0, *self.groups[:-1])).astype(np.intp)

    @property
    def _rows(self) -> int:
        """Rows of codes: tokens, or channels where groups run along the tokens."""
        return self.tokens if self.axis == "rank" else self.rank

    def _code_bytes(self, page: Bytes) -> Bytes:
        size = self.rank * self.tokens * self.bits // 8
        return page[self.data : self.data + size].reshape(self._rows, -1)

    def _metadata(self, page: Bytes) -> npt.NDArray[np.float16]:
        size = self._rows * len(self.groups) * META_BYTES
        return page[self.meta : self.meta + size].view(np.float16).reshape(self._rows, len(self.groups), 2)

    def _floats(self, page: Bytes) -> npt.NDArray[np.floating]:
        kind = FLOATS[self.bits]
        size = self.tokens * self.rank * kind.itemsize
        return page[self.data : self.data + size].view(kind).reshape(self.tokens, self.rank)

    def read(self, page: Bytes) -> Floats:
        """The part's values [tokens, rank] float32, dequantized. ``page`` is the uint8 bytes of one page."""
        if not self.groups:
            return self._floats(page).astype(np.float32)
        scale, minimum = self._spread(self._metadata(page))
        values = unpack(self._code_bytes(page), self.bits) * scale + minimum
        return values if self.axis == "rank" else values.T

    def write(self, page: Bytes, values: Floats, position: Positions = 0) -> None:
        """Encode ``values`` [tokens, rank] into the page. ``position`` in the sequence: of the first of them, which the
        others follow; or of each [tokens].
        """
        if not self.groups:
            self._floats(page)[:] = values
            return
        rows = values if self.axis == "rank" else np.ascontiguousarray(values.T)
        metadata, levels = self._metadata(page), (1 << self.bits) - 1
        low = np.minimum.reduceat(rows, self._starts, axis=1)
        high = np.maximum.reduceat(rows, self._starts, axis=1)
        width = high - low
        metadata[..., 0], metadata[..., 1] = width * self.span / levels, low + width * ((1 - self.span) / 2)
        scale, minimum = self._spread(metadata)
        exact = np.divide(rows - minimum, scale, out=np.zeros_like(rows), where=scale > 0)
        exact = np.rint(exact) if self.key is None else np.floor(exact + self._noise(self.key, position))
        codes = np.clip(exact, 0, levels).astype(np.uint8)
        self._code_bytes(page)[:] = pack(codes, self.bits)
        if self.sums is not None:
            self._write_sums(page, np.add.reduceat(codes, self._starts, axis=1, dtype=np.uint32), *self.sums)

    def _write_sums(self, page: Bytes, sums: npt.NDArray[np.uint32], at: int, width: int) -> None:
        low_bytes = sums.astype("<u4")[..., None].view(np.uint8)[..., :width]
        page[at : at + low_bytes.size] = low_bytes.ravel()

    def _noise(self, key: int, position: Positions) -> Floats:
        found = noise(key, position, self.tokens, self.rank)
        return found if self.axis == "rank" else found.T

    def _spread(self, metadata: npt.NDArray[np.float16]) -> tuple[Floats, Floats]:
        """Scale and minimum of every element [rows, axis length]."""
        wide = np.repeat(metadata.astype(np.float32), self.groups, axis=1)
        return wide[..., 0], wide[..., 1]


def pack(codes: Bytes, bits: int) -> Bytes:
    """[rows, n] codes below 2^bits as [rows, n * bits / 8] bytes, the first code in the lowest bits."""
    if bits == 8:
        return codes
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(codes.reshape(len(codes), -1, len(shifts)) << shifts, axis=2)


def unpack(packed: Bytes, bits: int) -> Bytes:
    """The inverse of ``pack``."""
    if bits == 8:
        return packed
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    mask = np.uint8((1 << bits) - 1)
    return ((packed[..., None] >> shifts) & mask).reshape(len(packed), -1)


def mixed(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's finalizer: every bit of x moves every bit of the result."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def noise_key(*numbers: int) -> int:
    """A hash of ``numbers`` (taken modulo 2^32), in order: key <- mixed((key xor number) + 0x9E3779B9), from 0."""
    key = np.zeros(1, np.uint32)
    for number in numbers:
        key = mixed((key ^ np.uint32(number & 0xFFFFFFFF)) + np.uint32(0x9E3779B9))
    return int(key[0])


def noise(key: int, position: Positions, tokens: int, rank: int) -> Floats:
    """Multiples of 2^-24 in [0, 1), [tokens, rank]: of a token and channel c, the first 24 bits of noise_key(numbers of
    ``key``, the token's position, c). ``position`` as in Part.write.
    """
    found = position.astype(np.int64) if isinstance(position, np.ndarray) else np.arange(position, position + tokens)
    token = (found & 0xFFFFFFFF).astype(np.uint32)[:, None]
    channel = np.arange(rank, dtype=np.uint32)[None, :]
    step = np.uint32(0x9E3779B9)
    return (mixed((mixed((np.uint32(key) ^ token) + step) ^ channel) + step) >> np.uint32(8)) * np.float32(2**-24)


def parts(layout: CacheLayout, bucket: int) -> dict[int, tuple[Part, Part]]:
    """For each lane of a bucket (index into plan.lanes) where its K and its V are and how they are written."""
    plan = layout.plan
    tier, p = plan.tiers[plan.buckets[bucket].tier], plan.page_tokens

    def groups(rank: int, bits: int, axis: str, group: int) -> tuple[int, ...]:
        if bits >= 16:
            return ()
        if axis == "rank":
            return groups_along_rank(rank, group)
        return tuple(min(group, p - at) for at in range(0, p, group))

    found = {}
    for index in sorted(plan.buckets[bucket].lanes):
        lane, slab = plan.lanes[index], layout.slab(bucket, index)
        k_groups = groups(lane.rank_k, tier.bits_k, tier.axis_k, tier.group_k)
        v_groups = groups(lane.rank_v, tier.bits_v, tier.axis_v, tier.group_v)
        sums = (
            (slab.k_sums, sum_bytes(tier.bits_k, tier.group_k)),
            (slab.v_sums, sum_bytes(tier.bits_v, tier.group_v)),
        )
        sums_k, sums_v = sums if tier.sums else (None, None)
        keys = (None, None)
        if tier.rounding == "stochastic":
            keys = (noise_key(plan.seed, lane.layer, lane.head, 0), noise_key(plan.seed, lane.layer, lane.head, 1))
        found[index] = (
            Part(slab.k, slab.k_meta, p, lane.rank_k, tier.bits_k, tier.axis_k, k_groups, keys[0], sums_k, tier.span_k),
            Part(slab.v, slab.v_meta, p, lane.rank_v, tier.bits_v, tier.axis_v, v_groups, keys[1], sums_v, tier.span_v),
        )
    return found
