"""Cold pages: pages in fewer bytes while nobody attends them, bit-exact.

    page      | K and V, and the metadata of codes, of every lane |                as the layout says
    part      numbers of one kind: K | V | scales | minima | sums | the rest
    plane     byte i of a part's numbers, a column for each channel
    coded     version, a length for each plane, the planes: Huffman codes, or as they are

An entropy coder has one table for what it codes at once. So numbers of one kind are gathered
first, and columns that are alike share a table: plugins_cpp/src/cpu/coding.cc has the format.
``PageCodec`` is what a store needs of it: host memory today, a disk or a wire just so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvlathe.plan.codec import PageMatrix, matrices
from kvlathe.plan.formats import Format
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.native.coding import Coder, Matrix, Part, coding_library
from kvlathe.runtime.sessions.protocols import PageMover, State

CODING = "columns"
"""The coding of pages that CodedPages encoded."""


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


@dataclass
class Gathered:
    """Matrices of one kind, those of equally many rows together."""

    width: int
    turn: int = 0
    by_rows: dict[int, list[Matrix]] = field(default_factory=dict)

    def add(self, rows: int, matrix: Matrix) -> None:
        self.by_rows.setdefault(rows, []).append(matrix)

    @property
    def parts(self) -> Iterator[Part]:
        for rows, found in sorted(self.by_rows.items()):
            yield Part(rows, self.width, self.turn, tuple(found))


def parts_of(layout: CacheLayout, bucket: int) -> list[Part]:
    """The parts of a bucket's pages. Together they are every byte once."""
    tier = layout.plan.index.buckets[bucket].tier
    found: list[Part] = []
    for side, form in enumerate((tier.k, tier.v)):
        of_side = [pair[side] for pair in matrices(layout, bucket).values()]
        written = [matrix for matrix in of_side if not matrix.beginning]
        found += _elements(written, form).parts
        if form.is_coded:
            for half in range(form.halves):
                found += _halves(written, half).parts
            if form.sums:
                found += _sums(written, form).parts
    rest = Gathered(1)
    for first, end in _between(found, layout.page_stride[bucket]):
        rest.add(end - first, Matrix(first, 1, 1, end - first))
    return [*found, *rest.parts]


def _elements(written: Iterable[PageMatrix], form: Format) -> Gathered:
    """K or V itself. A column is a channel or, of packed codes, those that share
    bytes."""
    gathered = Gathered(form.unit_bytes, turn=int(form.bits == 32))
    for matrix in written:
        if form.along_tokens:
            size = form.element_bytes(matrix.tokens)
            gathered.add(size, Matrix(matrix.data, matrix.rank, 1, size))
        else:
            size = form.element_bytes(matrix.rank)
            columns = size // form.unit_bytes
            place = Matrix(matrix.data, columns, size, form.unit_bytes)
            gathered.add(matrix.tokens, place)
    return gathered


def _halves(written: Iterable[PageMatrix], half: int) -> Gathered:
    """The scales of groups, or their minima. A column is a lane's groups: of each
    token, or of 64 channels at most."""
    gathered = Gathered(2)
    for matrix in written:
        _add_groups(gathered, matrix, matrix.meta + 2 * half, matrix.format.group_bytes)
    return gathered


def _sums(written: Iterable[PageMatrix], form: Format) -> Gathered:
    """The sums of groups' codes."""
    gathered = Gathered(form.sum_bytes)
    for matrix in written:
        _add_groups(gathered, matrix, matrix.sums, form.sum_bytes)
    return gathered


def _add_groups(gathered: Gathered, matrix: PageMatrix, at: int, size: int) -> None:
    """Add what each group of a lane has, ``size`` bytes apart from ``at`` on."""
    groups = len(matrix.groups)
    if matrix.format.along_rank:
        gathered.add(matrix.tokens, Matrix(at, groups, groups * size, size))
    else:
        count = matrix.rank * groups
        rows = math.gcd(count, 64)
        gathered.add(rows, Matrix(at, count // rows, size, rows * size))


def _between(parts: Sequence[Part], stride: int) -> Iterator[tuple[int, int]]:
    """The ranges of a page that are in no part."""
    taken = np.zeros(stride + 1, bool)
    taken[-1] = True
    for part in parts:
        row = np.arange(part.rows)[:, None, None]
        byte = np.arange(part.width)
        for matrix in part.matrices:
            column = np.arange(matrix.columns)[:, None]
            places = matrix.at + row * matrix.row_stride + column * matrix.column_stride
            taken[places + byte] = True
    edges = np.flatnonzero(np.diff(taken, prepend=True))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


class CodedPages:
    """PageCodec of the native library. Raises KvlatheError where there is none."""

    name = CODING

    def __init__(self, layout: CacheLayout) -> None:
        library = coding_library()
        self._coders = [
            Coder(library, parts_of(layout, bucket), size)
            for bucket, size in enumerate(layout.page_stride)
        ]

    def encode(self, bucket: int, page: bytes) -> bytes:
        return self._coders[bucket].encode(np.frombuffer(page, np.uint8))

    def decode(self, bucket: int, data: bytes) -> bytes:
        return self._coders[bucket].decode(data)


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

    def read_state(self, state: State) -> bytes:
        return self._mover.read_state(state)

    def write_state(self, data: bytes) -> State:
        return self._mover.write_state(data)
