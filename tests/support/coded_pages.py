"""Coded pages (plugins_cpp/src/cpu/coding.cc) in NumPy: a plain decoder, and an encoder with
one class. They share nothing with the library but what coding.cc's head says."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.native.coding import Matrix, Part, coding_library

Bytes = npt.NDArray[np.uint8]
VERSION, STREAMS, LONGEST = 2, 8, 11
AS_IT_IS = 1 << 31
MARKED = range(16, 65)
"""Rows of parts whose repeats are left out."""


def need_coder() -> None:
    """Skips a test where there is no library that codes pages."""
    try:
        coding_library()
    except KvlatheError as error:
        pytest.skip(str(error))


def numbers_of(part: Part, matrix: Matrix) -> npt.NDArray[np.intp]:
    """The places of a matrix's numbers in a page, in the order of a plane: [n, width]."""
    rows = np.arange(part.rows) * matrix.row_stride
    columns = np.arange(matrix.columns) * matrix.column_stride
    grid = matrix.at + rows[:, None] + columns
    if matrix.column_stride > matrix.row_stride:
        grid = grid.T
    return grid.reshape(-1, 1) + np.arange(part.width)


def turned(planes: Bytes, turn: int) -> Bytes:
    """[n, width] bytes of numbers, turned left by ``turn`` bits (right: below 0)."""
    bits = np.unpackbits(planes, axis=1, bitorder="little")
    return np.packbits(np.roll(bits, turn, axis=1), axis=1, bitorder="little")


class Bits:
    """Reads bits, the first in the highest place of the first byte. Zeros past the end."""

    def __init__(self, data: bytes) -> None:
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8)).tolist()
        self.at = 0

    def take(self, count: int) -> int:
        value = 0
        for bit in self.bits[self.at : self.at + count]:
            value = 2 * value + bit
        left = self.at + count - len(self.bits)
        self.at += count
        return value << max(0, min(left, count))


Kept = list[int]
"""For each row of a matrix the place of the kept one that it equals."""


def take_kept(bits: Bits, rows: int) -> Kept:
    """A bit says whether rows repeat; then each has one, and the place that it
    repeats."""
    kept: Kept = []
    repeats = bits.take(1)
    for _ in range(rows):
        again = repeats and bits.take(1)
        kept.append(bits.take(6) if again else max(kept, default=-1) + 1)
    return kept


def in_columns(plane: Bytes, part: Part, marks: Sequence[Kept], forth: bool) -> Bytes:
    """A plane as columns one after the other, or back."""
    out: list[Bytes] = []
    at = 0
    for matrix, kept in zip(part.matrices, marks, strict=True):
        rows = max(kept) + 1
        size = rows * matrix.columns
        one = plane[at : at + size]
        if matrix.column_stride <= matrix.row_stride:
            shape = (rows, matrix.columns)
            one = one.reshape(shape if forth else shape[::-1]).T.ravel()
        out.append(one)
        at += size
    return np.concatenate([plane[:0], *out])


def take_lengths(bits: Bits) -> list[int]:
    """Steps from the last length; runs of symbols that do not occur."""
    lengths: list[int] = []
    last = 8
    while len(lengths) < 256:
        kind = 0
        while kind < 4 and bits.take(1):
            kind += 1
        if kind == 3:
            lengths += [0] * (1 + bits.take(8))
            continue
        last = bits.take(4) if kind == 4 else last + (0, 1, -1)[kind]
        lengths.append(last)
    return lengths


def codes_of(lengths: Sequence[int]) -> dict[tuple[int, int], int]:
    """Symbols by (bits, code): codes ascend with length, then symbol."""
    present = sorted((length, s) for s, length in enumerate(lengths) if length)
    if len(present) < 2:
        return {(0, 0): present[0][1] if present else 0}
    codes: dict[tuple[int, int], int] = {}
    code = before = 0
    for length, symbol in present:
        code <<= length - before
        codes[length, code] = symbol
        code += 1
        before = length
    return codes


def take_symbol(bits: Bits, codes: dict[tuple[int, int], int]) -> int:
    code = length = 0
    while (length, code) not in codes:
        code = 2 * code + bits.take(1)
        length += 1
    return codes[length, code]


def stream_rows(rows: int) -> Iterator[range]:
    """The rows of each stream."""
    each = -(-rows // STREAMS)
    for s in range(STREAMS):
        yield range(min(s * each, rows), min((s + 1) * each, rows))


def length_word(plane: int) -> str:
    """The form of a stream's length, by the bytes of its plane."""
    return "<u2" if plane < 1 << 15 else "<u4"


def decode_plane(data: bytes, part: Part, count: int) -> Bytes:
    """``count`` columns one after the other."""
    width = data[0]
    head = Bits(data[1:])
    classes = [head.take(width) for _ in range(count)]
    tables = [codes_of(take_lengths(head)) for _ in range(1 << width)]
    at = 1 + -(-head.at // 8)
    word = np.dtype(length_word(count * part.rows))
    sizes = np.frombuffer(data[at:], word, STREAMS).tolist()
    at += word.itemsize * STREAMS
    columns = np.zeros((count, part.rows), np.uint8)
    for rows, size in zip(stream_rows(part.rows), sizes, strict=True):
        bits = Bits(data[at : at + size])
        for column, of in zip(columns, classes, strict=True):
            for r in rows:
                column[r] = take_symbol(bits, tables[of])
        at += size
    assert at == len(data)
    return columns.ravel()


def decode_page(data: bytes, parts: Sequence[Part], size: int) -> Bytes:
    page = np.zeros(size, np.uint8)
    assert data[0] == VERSION
    count = sum(part.width for part in parts)
    words = iter(np.frombuffer(data[1 : 1 + 4 * count], "<u4").tolist())
    at = 1 + 4 * count
    head = Bits(data[at:])
    marks = [
        [
            take_kept(head, part.rows) if part.rows in MARKED else [*range(part.rows)]
            for _ in part.matrices
        ]
        for part in parts
    ]
    at += -(-head.at // 8)
    for part, of in zip(parts, marks, strict=True):
        planes: list[Bytes] = []
        pairs = zip(part.matrices, of, strict=True)
        columns = sum(m.columns * (max(kept) + 1) for m, kept in pairs) // part.rows
        for word in [next(words) for _ in range(part.width)]:
            body = data[at : at + (word & ~AS_IT_IS)]
            at += len(body)
            if word & AS_IT_IS:
                planes.append(np.frombuffer(body, np.uint8))
            else:
                plane = decode_plane(body, part, columns)
                planes.append(in_columns(plane, part, of, forth=False))
        _fill(page, part, of, turned(np.stack(planes, axis=1), -part.turn))
    assert at == len(data)
    return page


def _fill(page: Bytes, part: Part, marks: Sequence[Kept], numbers: Bytes) -> None:
    first = 0
    for matrix, kept in zip(part.matrices, marks, strict=True):
        rows = max(kept) + 1
        own = numbers[first : first + rows * matrix.columns]
        first += len(own)
        if matrix.column_stride <= matrix.row_stride:
            own = own.reshape(rows, matrix.columns, part.width)[kept]
        else:
            own = own.reshape(matrix.columns, rows, part.width)[:, kept]
        page[numbers_of(part, matrix)] = own.reshape(-1, part.width)


def lengths_of(symbols: Bytes) -> list[int]:
    """Lengths of Huffman codes; of all bytes the same where one would be too long."""
    counts = np.bincount(symbols, minlength=256).tolist()
    heap = [(n, s, {s: 0}) for s, n in enumerate(counts) if n]
    heapq.heapify(heap)
    while len(heap) > 1:
        n, s, left = heapq.heappop(heap)
        m, _, right = heapq.heappop(heap)
        both = {one: depth + 1 for one, depth in (left | right).items()}
        heapq.heappush(heap, (n + m, s, both))
    lengths = [0] * 256
    for symbol, depth in heap[0][2].items():
        lengths[symbol] = max(1, depth)
    return lengths if max(lengths) <= LONGEST else [8] * 256


def encode_plane(columns: Bytes, part: Part) -> bytes:
    """One class; every length in its own bits, without steps and runs."""
    lengths = lengths_of(columns)
    words = {s: (length, code) for (length, code), s in codes_of(lengths).items()}
    head = "".join(f"1111{n:04b}" if n else "1110" + "0" * 8 for n in lengths)
    streams: list[bytes] = []
    for rows in stream_rows(part.rows):
        own = columns.reshape(part.columns, part.rows)[:, rows.start : rows.stop]
        text = "".join(
            f"{code:0{length}b}" if length else ""
            for length, code in (words[s] for s in own.ravel().tolist())
        )
        streams.append(_packed(text))
    word = length_word(len(columns))
    sizes = np.array([len(stream) for stream in streams], word).tobytes()
    return b"".join((b"\0", _packed(head), sizes, *streams))


def _packed(text: str) -> bytes:
    return np.packbits(np.array(list(text), dtype=np.uint8)).tobytes()


def encode_page(page: Bytes, parts: Sequence[Part]) -> bytes:
    """Every plane coded, fewer bytes or not; no row is left out."""
    words: list[int] = []
    marks = sum(len(part.matrices) for part in parts if part.rows in MARKED)
    bodies = [bytes(-(-marks // 8))]
    for part in parts:
        whole = [[*range(part.rows)]] * len(part.matrices)
        places = [numbers_of(part, matrix) for matrix in part.matrices]
        planes = turned(page[np.concatenate(places)], part.turn)
        for i in range(part.width):
            columns = in_columns(planes[:, i], part, whole, forth=True)
            bodies.append(encode_plane(columns, part))
            words.append(len(bodies[-1]))
    head = bytes([VERSION]) + np.array(words, "<u4").tobytes()
    return head + b"".join(bodies)
