"""The bytes of K or V of one lane in a page: the number formats of a Tier, in numpy.

Unquantized matrices are IEEE half or single, [token][rank]. Quantized ones hold
asymmetric codes,

    x ~ minimum + scale * code,   scale = (max - min) / (2^bits - 1),   one (scale, minimum) pair of halves a group

(max - min is first cut to its middle part where the tier's span is below 1),

as [token][rank] with groups along the rank, or as [rank][token] with groups along the
page's tokens. Codes below 8 bit are packed with the first element in the lowest bits,
those of 3 bits in blocks (kvlathe/plan/packing.py). Metadata follows the order of the
groups. The rounding of scale and minimum to half is part of the code: codes are chosen
for the rounded pair. A constant group has scale 0 and is exact to half. Where a tier
stores sums, those of each group's codes follow in the same order, little-endian.

Those are affine codes. A group of normal ones has one half, the magnitude m of its
outermost levels:

    x ~ m (2 table[code] / 255 - 1),   m of least squared error, found in FITS passes from m = NORMAL_TOP sqrt(mean x^2)

A group of 8-bit floats has one half as well, its scale, rounded up so that nothing
clips. Codes are E4M3, the nearest to x / scale, of two the even one:

    x ~ scale e4m3[code],   scale = the least half from max |x| / 448 up

Codes are rounded to the nearest, or up where a hash of the plan's seed, the lane, K or
V, the token's position and the channel (``noise``) falls below the fraction: no bias,
no state, the same page from the same tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.plan.formats import NORMAL_TOP, Format
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.noise import noise, noise_key
from kvlathe.plan.packing import pack, unpack

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Positions = int | npt.NDArray[np.integer]
FITS = 5
"""Passes over a group of fixed levels: codes for a scale, then the best scale for the
codes (Lloyd's iteration on one number)."""
FLOATS = {16: np.dtype(np.float16), 32: np.dtype(np.float32)}


@dataclass(frozen=True)
class PageMatrix:
    """K or V of one lane in the pages of a bucket.

    ``data``, ``meta`` and ``sums`` are byte offsets from the page's start: of the
    elements, the metadata and, where the format stores them, the sums of codes.
    ``key``: of this lane's noise; None: codes are rounded to the nearest.
    ``beginning``: V that is so many dims of the K that lies here: it is read, and never
    written; 0: the matrix is its own.
    """

    format: Format
    data: int
    meta: int
    sums: int
    tokens: int
    rank: int
    key: int | None = None
    beginning: int = 0

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
        if self.beginning:
            return ()
        data = (self.data, self.format.element_bytes(self.rank))
        if not self.groups:
            return (data,)
        meta = (self.meta, len(self.groups) * self.format.group_bytes)
        if not self.format.sums:
            return data, meta
        return data, meta, (self.sums, len(self.groups) * self.format.sum_bytes)

    @cached_property
    def _starts(self) -> npt.NDArray[np.intp]:
        return np.cumsum((0, *self.groups[:-1])).astype(np.intp)

    @property
    def _rows(self) -> int:
        """Rows of codes: tokens, or channels where groups run along the tokens."""
        return self.tokens if self.format.along_rank else self.rank

    def _code_bytes(self, page: Bytes) -> Bytes:
        size = self.format.element_bytes(self.rank * self.tokens)
        return page[self.data : self.data + size].reshape(self._rows, -1)

    def _metadata(self, page: Bytes) -> npt.NDArray[np.float16]:
        """[rows, groups, 2]: (scale, minimum); [rows, groups, 1] without a minimum."""
        groups = len(self.groups)
        size = self._rows * groups * self.format.group_bytes
        halves = page[self.meta : self.meta + size].view(np.float16)
        return halves.reshape(self._rows, groups, -1)

    def _floats(self, page: Bytes) -> npt.NDArray[np.floating]:
        kind = FLOATS[self.format.bits]
        return (
            page[self.data : self.data + self.tokens * self.rank * kind.itemsize]
            .view(kind)
            .reshape(self.tokens, self.rank)
        )

    def read(self, page: Bytes) -> Floats:
        """The values [tokens, rank] float32, dequantized. ``page`` is the uint8
        bytes of one page."""
        values = self._values(page)
        return values[:, : self.beginning] if self.beginning else values

    def _values(self, page: Bytes) -> Floats:
        if not self.groups:
            return self._floats(page).astype(np.float32)
        scale, minimum = self._spread(self._metadata(page))
        codes = unpack(self._code_bytes(page), self.format)
        values = worths(self.format)[codes] * scale + minimum
        return values if self.format.along_rank else values.T

    def write(self, page: Bytes, values: Floats, position: Positions = 0) -> None:
        """Encode ``values`` [tokens, rank] into the page. ``position`` in the sequence:
        of the first of them, which the others follow; or of each [tokens].
        """
        if self.beginning:
            return
        if not self.groups:
            self._floats(page)[:] = values
            return
        rows = values if self.format.along_rank else np.ascontiguousarray(values.T)
        codes = self._coded(rows, self._metadata(page), position)
        self._code_bytes(page)[:] = pack(codes, self.format)
        if self.format.sums:
            self._write_sums(page, codes)

    def _coded(
        self, rows: Floats, metadata: npt.NDArray[np.float16], position: Positions
    ) -> Bytes:
        """Codes of ``rows``; their scales and minima go into ``metadata``."""
        if self.format.coding == "normal":
            return self._fitted(rows, metadata)
        if self.format.coding == "float8":
            return self._as_floats(rows, metadata)
        span, top = self.format.span, self.format.top
        low = np.minimum.reduceat(rows, self._starts, axis=1)
        width = np.maximum.reduceat(rows, self._starts, axis=1) - low
        metadata[..., 0] = width * span / top
        metadata[..., 1] = low + width * ((1 - span) / 2)
        exact = self._exact(rows, metadata)
        if self.key is None:
            whole = np.rint(exact)
        else:
            drawn = self._noise(self.key, position)
            whole = np.floor(exact + drawn)
        return np.clip(whole, 0, top).astype(np.uint8)

    def _fitted(self, rows: Floats, metadata: npt.NDArray[np.float16]) -> Bytes:
        """Normal codes; their magnitudes go into ``metadata``. Sums are double,
        so that the order of adding decides nothing."""
        wide = rows.astype(np.float64)
        energy = np.add.reduceat(wide * wide, self._starts, axis=1)
        magnitude = NORMAL_TOP[self.format.bits] * np.sqrt(energy / self.groups)
        codes = self._nearest(rows, metadata, magnitude)
        for _ in range(FITS - 1):
            magnitude = self._best_magnitude(wide, codes)
            codes = self._nearest(rows, metadata, magnitude)
        return codes

    def _as_floats(self, rows: Floats, metadata: npt.NDArray[np.float16]) -> Bytes:
        """Codes of 8-bit floats; their scales go into ``metadata``."""
        largest = np.maximum.reduceat(np.abs(rows), self._starts, axis=1)
        metadata[..., 0] = half_from(largest / np.float32(self.format.top))
        return e4m3_codes(self._exact(rows, metadata))

    def _nearest(
        self, rows: Floats, metadata: npt.NDArray[np.float16], magnitude: Doubles
    ) -> Bytes:
        """Normal codes for these magnitudes [rows, groups], which go into
        ``metadata``."""
        metadata[..., 0] = magnitude.astype(np.float32)
        worth = np.clip(np.rint(self._exact(rows, metadata)), 0, self.format.top)
        return nearest_codes(self.format)[worth.astype(np.uint8)]

    def _best_magnitude(self, rows: Doubles, codes: Bytes) -> Doubles:
        """The magnitude of least squared error for these codes, [rows, groups]."""
        ends = self.format.top / 2
        levels = worths(self.format)[codes] - ends
        along = np.add.reduceat(rows * levels, self._starts, axis=1)
        return np.abs(
            ends * along / np.add.reduceat(levels * levels, self._starts, axis=1)
        )

    def _exact(self, rows: Floats, metadata: npt.NDArray[np.float16]) -> Floats:
        """Codes as they would be without rounding; 0 where a group has no scale."""
        scale, minimum = self._spread(metadata)
        return np.divide(
            rows - minimum, scale, out=np.zeros_like(rows), where=scale > 0
        )

    def _write_sums(self, page: Bytes, codes: Bytes) -> None:
        """The low bytes of each group's sum, little-endian, behind the metadata."""
        sums = np.add.reduceat(codes, self._starts, axis=1, dtype=np.uint32)
        all_bytes = sums.astype("<u4")[..., None].view(np.uint8)
        low_bytes = all_bytes[..., : self.format.sum_bytes]
        end = self.sums + low_bytes.size
        page[self.sums : end] = low_bytes.ravel()

    def _noise(self, key: int, position: Positions) -> Doubles:
        drawn = noise(key, position, self.tokens, self.rank)
        return drawn if self.format.along_rank else drawn.T

    def _spread(self, metadata: npt.NDArray[np.float16]) -> tuple[Floats, Floats]:
        """Scale and minimum of every element [rows, axis length]."""
        wide = np.repeat(metadata.astype(np.float32), self.groups, axis=1)
        first = wide[..., 0]
        decoding = self.format.decoding
        minimum = wide[..., 1] if decoding.has_minimum else first * decoding.lowest
        return first * np.float32(decoding.step), minimum


def worths(form: Format) -> npt.NDArray[np.uint8 | np.float32]:
    """The worth of each code: whole numbers as bytes, others as float32."""
    return np.array(form.table, np.uint8 if form.decoding.is_whole else np.float32)


def half_from(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float16]:
    """The least half from each number up; the largest half of all where there is none.
    No number is below 0."""
    x = np.minimum(x, np.finfo(np.float16).max)
    nearest = x.astype(np.float16)
    return np.where(nearest < x, np.nextafter(nearest, np.float16(np.inf)), nearest)


def e4m3_codes(x: Floats) -> Bytes:
    """The nearest 8-bit floats, of two the even one; those beyond 448 are 448. A number
    of the binade 2^e is a whole multiple of 2^(e - 3), e from -6 up."""
    size = np.minimum(np.abs(x), np.float32(448))
    _, exponent = np.frexp(np.maximum(size, np.float32(2**-6)))  # e + 1
    multiple = np.rint(np.ldexp(size, 4 - exponent))  # 8 to 16; less below 2^-6
    code = 8 * (exponent + 5) + multiple.astype(np.int32)
    return (code | np.signbit(x) << 7).astype(np.uint8)


def nearest_codes(form: Format) -> Bytes:
    """[256]: of every byte the code that is worth most nearly as much; of two, the
    smaller one."""
    return np.abs(np.arange(256)[:, None] - form.table).argmin(1).astype(np.uint8)


def matrices(
    layout: CacheLayout, bucket: int
) -> dict[int, tuple[PageMatrix, PageMatrix]]:
    """For each lane of a bucket (index into plan.lanes) where its K and its V are and
    how they are written."""
    plan = layout.plan
    tier, p = plan.index.buckets[bucket].tier, plan.page_tokens
    drawn = tier.rounding == "stochastic"
    made = {}
    for index in plan.index.buckets[bucket].lanes:
        lane, offsets = plan.lanes[index], layout.lane_offsets(bucket, index)
        at = (lane.layer, lane.head)
        key_k = noise_key(plan.seed, *at, 0) if drawn else None
        key_v = noise_key(plan.seed, *at, 1) if drawn else None
        k = PageMatrix(
            tier.k, offsets.k, offsets.k_meta, offsets.k_sums, p, lane.rank_k, key_k
        )
        if lane.values_in_keys:
            made[index] = (k, dataclasses.replace(k, beginning=lane.rank_v))
            continue
        v = PageMatrix(
            tier.v, offsets.v, offsets.v_meta, offsets.v_sums, p, lane.rank_v, key_v
        )
        made[index] = (k, v)
    return made


def element_places(form: Format, rank: int, tokens: int) -> tuple[Places, Places]:
    """The places of element (token, channel) of codes: its code and its group, both
    [tokens, rank].

    Code i of b bits is bits (i * b) % 8 and up of byte i * b // 8 (lowest bits first;
    codes of 3 bits: kvlathe/plan/packing.py). The (scale, minimum) of group j are
    halves 2 j and 2 j + 1 of the metadata; without a minimum, its scale is half j.
    """
    token = np.arange(tokens)[:, None]
    channel = np.arange(rank)[None, :]
    if form.along_rank:
        sizes = form.group_sizes(rank, tokens)
        of_channel = np.repeat(np.arange(len(sizes)), sizes)
        return token * rank + channel, token * len(sizes) + of_channel[None, :]
    return channel * tokens + token, channel * -(
        -tokens // form.group
    ) + token // form.group
