"""Cold pages: sealed pages in fewer bytes while nobody attends them, bit-exact.

    page     | K codes, V codes, scales of every lane, and what lies between |   as the layout says
    parts    K codes | V codes | scales by side, low bytes and high | the rest       alike numbers lie together
    encoded  version, a length for each part, the parts                         zstd, or as they are

An entropy coder has one table for a block. So numbers of one kind are gathered before it:
codes of keys have another histogram than those of values, and of a 16-bit number only the
high byte has one at all. ``PageCodec`` is what a store needs of it: host memory today, a
disk or a wire just so.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.plan.codec import PageMatrix, matrices
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.sessions.protocols import PageMover, State

Bytes = npt.NDArray[np.uint8]
Range = tuple[int, int]
"""Bytes [first, end) of a page."""
VERSION = 1
LEVEL = 1
"""The level of zstd. Higher ones save a hundredth more and take several times as
long."""
AS_IT_IS = 1 << 31
"""In a part's length: its bytes are not coded."""


ZSTD = "zstd"
"""The coding of pages that ZstdPages encoded."""


class PageCodec(Protocol):
    """Encodes the bytes of a page, and gives exactly those back. ``name``: of the
    coding."""

    @property
    def name(self) -> str: ...

    def encode(self, bucket: int, page: bytes) -> bytes:
        """The page of a bucket in fewer bytes, mostly."""
        ...

    def decode(self, bucket: int, data: bytes) -> bytes:
        """The page. Raises KvlatheError for bytes that ``encode`` did not write."""
        ...


@dataclass(frozen=True)
class Part:
    """Numbers of one kind: ``ranges`` of a page of ``stride`` bytes, ascending, and the
    ``width`` of a number in bytes. Byte i of all numbers is a plane."""

    ranges: tuple[Range, ...]
    width: int
    stride: int

    @cached_property
    def plane_bytes(self) -> int:
        return sum(end - first for first, end in self.ranges) // self.width

    @cached_property
    def _is_even(self) -> bool:
        """Whether the page is a table that has this part in some of its columns: lanes
        of one shape. One copy then moves a plane."""
        count = len(self.ranges)
        row = self.stride // count
        first, end = self.ranges[0]
        expected: list[Range] = []
        for i in range(count):
            before = i * row
            expected.append((first + before, end + before))
        if row * count != self.stride:
            return False
        return list(self.ranges) == expected

    def plane(self, page: Bytes, i: int) -> list[Bytes]:
        """Views of a page that together are plane i."""
        if self._is_even:
            first, end = self.ranges[0]
            return [page.reshape(len(self.ranges), -1)[:, first + i : end : self.width]]
        views: list[Bytes] = []
        for first, end in self.ranges:
            views.append(page[first + i : end : self.width])
        return views


def parts_of(layout: CacheLayout, bucket: int) -> list[Part]:
    """The parts of a bucket's pages. Together they are every byte once."""
    keys: list[Range] = []
    values: list[Range] = []
    k_scales: list[Range] = []
    v_scales: list[Range] = []
    for k, v in matrices(layout, bucket).values():
        keys.append(_data(k))
        if k.format.is_coded:
            k_scales.append(_scales(k))
        if v.beginning:
            continue
        values.append(_data(v))
        if v.format.is_coded:
            v_scales.append(_scales(v))
    tier = layout.plan.index.buckets[bucket].tier
    stride = layout.page_stride[bucket]
    rest = _between([*keys, *values, *k_scales, *v_scales], stride)
    kinds = [
        (keys, tier.k.unit_bytes),
        (values, tier.v.unit_bytes),
        (k_scales, 2),
        (v_scales, 2),
        (rest, 1),
    ]
    parts: list[Part] = []
    for ranges, width in kinds:
        if not ranges:
            continue
        part = Part(tuple(sorted(ranges)), width, stride)
        parts.append(part)
    return parts


def _data(matrix: PageMatrix) -> Range:
    size = matrix.format.data_bytes(matrix.rank, matrix.tokens)
    return matrix.data, matrix.data + size


def _scales(matrix: PageMatrix) -> Range:
    size = matrix.format.meta_bytes(matrix.rank, matrix.tokens)
    return matrix.meta, matrix.meta + size


def _between(ranges: Sequence[Range], stride: int) -> list[Range]:
    """The ranges of a page that are in none of them."""
    free: list[Range] = []
    at = 0
    for first, end in sorted(ranges):
        if first > at:
            free.append((at, first))
        at = max(at, end)
    if at < stride:
        free.append((at, stride))
    return free


class ZstdPages:
    """PageCodec: each plane of a page's parts a zstd frame, or as it is where that is
    not larger. Raises KvlatheError where the library is missing."""

    name = ZSTD

    def __init__(self, layout: CacheLayout, level: int = LEVEL) -> None:
        if find_spec("zstandard") is None:
            raise KvlatheError(
                "cold pages cannot be coded",
                "zstandard is not installed",
                f"run {pip_install('cold')}",
            )
        import zstandard

        self._strides = layout.page_stride
        buckets = range(len(layout.plan.index.buckets))
        self._parts = [parts_of(layout, bucket) for bucket in buckets]
        self._coder = zstandard.ZstdCompressor(level=level)
        self._decoder = zstandard.ZstdDecompressor()
        self._content_size = zstandard.frame_content_size
        self._failure = zstandard.ZstdError

    def encode(self, bucket: int, page: bytes) -> bytes:
        whole = np.frombuffer(page, np.uint8)
        lengths: list[int] = []
        bodies: list[bytes] = []
        for part in self._parts[bucket]:
            for i in range(part.width):
                plain = b"".join([view.tobytes() for view in part.plane(whole, i)])
                coded = self._coder.compress(plain)
                size = len(plain)
                length = len(coded)
                if length < size:
                    lengths.append(length)
                    bodies.append(coded)
                else:
                    lengths.append(size | AS_IT_IS)
                    bodies.append(plain)
        return b"".join((struct.pack(f"<B{len(lengths)}I", VERSION, *lengths), *bodies))

    def decode(self, bucket: int, data: bytes) -> bytes:
        parts = self._parts[bucket]
        count = sum(part.width for part in parts)
        head = struct.Struct(f"<B{count}I")
        if len(data) < head.size:
            raise _damaged("it ends early")
        version, *lengths = head.unpack_from(data)
        if version != VERSION:
            raise _damaged(f"it is of version {version}")
        sizes = [length & ~AS_IT_IS for length in lengths]
        if head.size + sum(sizes) != len(data):
            raise _damaged("its lengths are not those of its parts")
        page = np.empty(self._strides[bucket], np.uint8)
        left = iter(zip(lengths, sizes, strict=True))
        at = head.size
        for part in parts:
            for i in range(part.width):
                length, size = next(left)
                end = at + size
                plain = self._plain(data[at:end], length, part.plane_bytes)
                _fill(part.plane(page, i), plain)
                at = end
        return page.tobytes()

    def _plain(self, body: bytes, length: int, size: int) -> bytes:
        """The ``size`` bytes of a plane. What a frame claims is checked before memory
        is taken for it."""
        if length & AS_IT_IS:
            if len(body) != size:
                raise _damaged("a part has another size")
            return body
        try:
            if self._content_size(body) != size:
                raise _damaged("a part has another size")
            return self._decoder.decompress(body)
        except self._failure as error:
            raise _damaged(str(error)) from error


def _fill(views: Sequence[Bytes], plain: bytes) -> None:
    """Write a plane's bytes to the page that ``views`` are of."""
    numbers = np.frombuffer(plain, np.uint8)
    at = 0
    for view in views:
        end = at + view.size
        view[...] = numbers[at:end].reshape(view.shape)
        at = end


def _damaged(reason: str) -> KvlatheError:
    return KvlatheError(
        "a cold page cannot be read", reason, "compute the sequence again"
    )


class ColdPages(PageMover):
    """PageMover: the pages of ``mover``, encoded where they are read and decoded where
    they are written."""

    def __init__(self, mover: PageMover, codec: PageCodec) -> None:
        self._mover = mover
        self._codec = codec
        self.coding = codec.name

    def read_page(self, bucket: int, page: int) -> bytes:
        return self._codec.encode(bucket, self._mover.read_page(bucket, page))

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        self._mover.write_page(bucket, page, self._codec.decode(bucket, data))

    def leave_state(self, state: State) -> None:
        self._mover.leave_state(state)
