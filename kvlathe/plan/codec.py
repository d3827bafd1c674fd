"""How K or V of one lane is written in a page: the number formats of a Tier, in numpy.

Unquantized matrices are IEEE half or single, [token][rank]. Quantized ones hold
asymmetric codes,

    x ~ minimum + scale * code,   scale = (max - min) / (2^bits - 1),   one (scale, minimum) pair of halves a group

(max - min is first cut to its middle part where the tier's span is below 1),

as [token][rank] with groups along the rank, or as [rank][token] with groups along the
page's tokens. Codes below 8 bit are packed with the first element in the lowest bits.
Metadata follows the order of the groups. The rounding of scale and minimum to half is
part of the code: codes are chosen for the rounded pair. A constant group has scale 0
and is exact to half. Where a tier stores sums, those of each group's codes follow in
the same order, little-endian.

Codes are rounded to the nearest, or up where a hash of the plan's seed, the lane, K or
V, the token's position and the channel (``noise``) falls below the fraction: no bias,
no state, the same page from the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.plan.formats import META_BYTES, Format
from kvlathe.plan.layout import CacheLayout

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]
Positions = int | npt.NDArray[np.integer]
FLOATS = {16: np.dtype(np.float16), 32: np.dtype(np.float32)}


@dataclass(frozen=True)
class PageMatrix:
    """K or V of one lane in the pages of a bucket.

    ``data``, ``meta`` and ``sums`` are byte offsets from the page's start: of the
    elements, the metadata and, where the format stores them, the sums of codes.
    ``key``: of this lane's noise; None: codes are rounded to the nearest.
    """

    format: Format
    data: int
    meta: int
    sums: int
    tokens: int
    rank: int
    key: int | None = None

    @property
    def token_major(self) -> bool:
        """Whether each token's bytes (and metadata) are contiguous, so that single
        tokens can move."""
        return self.format.token_major

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Sizes of the groups along the axis; empty where there are no codes."""
        return self.format.group_sizes(self.rank, self.tokens)

    @property
    def fields(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes a token) of what a token-major matrix holds for each token."""
        data = (self.data, self.format.element_bytes(self.rank))
        if not self.groups:
            return (data,)
        meta = (self.meta, len(self.groups) * META_BYTES)
        if not self.format.sums:
            return data, meta
        return data, meta, (self.sums, len(self.groups) * self.format.sum_bytes)

    @cached_property
    def _starts(self) -> npt.NDArray[np.intp]:
        sizes_before = (0, *self.groups[:-1])
        return np.cumsum(sizes_before).astype(np.intp)

    @property
    def _rows(self) -> int:
        """Rows of codes: tokens, or channels where groups run along the tokens."""
        return self.tokens if self.format.along_rank else self.rank

    def _code_bytes(self, page: Bytes) -> Bytes:
        size = self.format.element_bytes(self.rank * self.tokens)
        return page[self.data : self.data + size].reshape(self._rows, -1)

    def _metadata(self, page: Bytes) -> npt.NDArray[np.float16]:
        size = self._rows * len(self.groups) * META_BYTES
        return (
            page[self.meta : self.meta + size]
            .view(np.float16)
            .reshape(self._rows, len(self.groups), 2)
        )

    def _floats(self, page: Bytes) -> npt.NDArray[np.floating]:
        kind = FLOATS[self.format.bits]
        size = self.tokens * self.rank * kind.itemsize
        return (
            page[self.data : self.data + size]
            .view(kind)
            .reshape(self.tokens, self.rank)
        )

    def read(self, page: Bytes) -> Floats:
        """The values [tokens, rank] float32, dequantized. ``page`` is the uint8
        bytes of one page."""
        if not self.groups:
            return self._floats(page).astype(np.float32)
        scale, minimum = self._spread(self._metadata(page))
        values = unpack(self._code_bytes(page), self.format.bits) * scale + minimum
        return values if self.format.along_rank else values.T

    def write(self, page: Bytes, values: Floats, position: Positions = 0) -> None:
        """Encode ``values`` [tokens, rank] into the page. ``position`` in the sequence:
        of the first of them, which the others follow; or of each [tokens].
        """
        if not self.groups:
            self._floats(page)[:] = values
            return
        rows = values if self.format.along_rank else np.ascontiguousarray(values.T)
        metadata, levels = self._metadata(page), (1 << self.format.bits) - 1
        low = np.minimum.reduceat(rows, self._starts, axis=1)
        high = np.maximum.reduceat(rows, self._starts, axis=1)
        width = high - low
        metadata[..., 0], metadata[..., 1] = (
            width * self.format.span / levels,
            low + width * ((1 - self.format.span) / 2),
        )
        scale, minimum = self._spread(metadata)
        exact = np.divide(
            rows - minimum, scale, out=np.zeros_like(rows), where=scale > 0
        )
        exact = (
            np.rint(exact)
            if self.key is None
            else np.floor(exact + self._noise(self.key, position))
        )
        codes = np.clip(exact, 0, levels).astype(np.uint8)
        self._code_bytes(page)[:] = pack(codes, self.format.bits)
        if self.format.sums:
            self._write_sums(page, codes)

    def _write_sums(self, page: Bytes, codes: Bytes) -> None:
        """The low bytes of each group's sum, little-endian, behind the metadata."""
        sums = np.add.reduceat(codes, self._starts, axis=1, dtype=np.uint32)
        little_endian = sums.astype("<u4")[..., None]
        all_bytes = little_endian.view(np.uint8)
        low_bytes = all_bytes[..., : self.format.sum_bytes]
        end = self.sums + low_bytes.size
        page[self.sums : end] = low_bytes.ravel()

    def _noise(self, key: int, position: Positions) -> Floats:
        drawn = noise(key, position, self.tokens, self.rank)
        return drawn if self.format.along_rank else drawn.T

    def _spread(self, metadata: npt.NDArray[np.float16]) -> tuple[Floats, Floats]:
        """Scale and minimum of every element [rows, axis length]."""
        pairs = metadata.astype(np.float32)
        wide = np.repeat(pairs, self.groups, axis=1)
        scale = wide[..., 0]
        minimum = wide[..., 1]
        return scale, minimum


def pack(codes: Bytes, bits: int) -> Bytes:
    """[rows, n] codes below 2^bits as [rows, n * bits / 8] bytes, the first code in the
    lowest bits."""
    if bits == 8:
        return codes
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(
        codes.reshape(len(codes), -1, len(shifts)) << shifts, axis=2
    )


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
    """A hash of ``numbers`` (taken modulo 2^32), in order: key <- mixed((key xor
    number) + 0x9E3779B9), from 0."""
    key = np.zeros(1, np.uint32)
    for number in numbers:
        key = mixed((key ^ np.uint32(number & 0xFFFFFFFF)) + np.uint32(0x9E3779B9))
    return int(key[0])


def noise(key: int, position: Positions, tokens: int, rank: int) -> Floats:
    """Multiples of 2^-24 in [0, 1), [tokens, rank]: of a token and channel c, the first
    24 bits of noise_key(numbers of ``key``, the token's position, c). ``position`` as
    in PageMatrix.write.
    """
    positions = (
        position.astype(np.int64)
        if isinstance(position, np.ndarray)
        else np.arange(position, position + tokens)
    )
    token = (positions & 0xFFFFFFFF).astype(np.uint32)[:, None]
    channel = np.arange(rank, dtype=np.uint32)[None, :]
    step = np.uint32(0x9E3779B9)
    return (
        mixed((mixed((np.uint32(key) ^ token) + step) ^ channel) + step) >> np.uint32(8)
    ) * np.float32(2**-24)


def matrices(
    layout: CacheLayout, bucket: int
) -> dict[int, tuple[PageMatrix, PageMatrix]]:
    """For each lane of a bucket (index into plan.lanes) where its K and its V are and
    how they are written."""
    plan = layout.plan
    tier, p = plan.tiers[plan.buckets[bucket].tier], plan.page_tokens
    drawn = tier.rounding == "stochastic"
    made = {}
    for index in sorted(plan.buckets[bucket].lanes):
        lane, offsets = plan.lanes[index], layout.lane_offsets(bucket, index)
        at = (lane.layer, lane.head)
        key_k = noise_key(plan.seed, *at, 0) if drawn else None
        key_v = noise_key(plan.seed, *at, 1) if drawn else None
        k = PageMatrix(
            tier.k, offsets.k, offsets.k_meta, offsets.k_sums, p, lane.rank_k, key_k
        )
        v = PageMatrix(
            tier.v, offsets.v, offsets.v_meta, offsets.v_sums, p, lane.rank_v, key_v
        )
        made[index] = (k, v)
    return made


def element_places(form: Format, rank: int, tokens: int) -> tuple[Places, Places]:
    """Where element (token, channel) of codes lies: its code and its group, both
    [tokens, rank].

    Code i of b bits is bits (i * b) % 8 and up of byte i * b // 8 (lowest bits first);
    the (scale, minimum) of group j are halves 2 j and 2 j + 1 of the metadata.
    """
    token, channel = np.arange(tokens)[:, None], np.arange(rank)[None, :]
    if form.along_rank:
        sizes = form.group_sizes(rank, tokens)
        of_channel = np.repeat(np.arange(len(sizes)), sizes)
        return token * rank + channel, token * len(sizes) + of_channel[None, :]
    return channel * tokens + token, channel * -(
        -tokens // form.group
    ) + token // form.group
