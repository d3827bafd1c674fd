"""Codes as bytes. Codes of 8, 4 and 2 bits fill bytes one after the other, the first in
the lowest bits. Codes of 3 bits lie in blocks of BLOCK codes; the last one of a row has
what is left. A block is three runs of bytes, and byte t of the runs together hold its
codes 8 t .. 8 t + 7:

    run   bits 0-2   bits 3-5   bits 6-7
    0     code 0     code 1     code 6, lower two bits
    1     code 2     code 3     code 7, lower two bits
    2     code 4     code 5     highest bit of code 6, then of code 7

So a vector of each run gives all codes by shifts within bytes, and 16 codes are 6 bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvlathe.plan.formats import Format

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
BLOCK = 64
"""Codes of 3 bits that are packed together."""


def pack(codes: Bytes, form: Format) -> Bytes:
    """[rows, n] codes of ``form`` as [rows, n * bits / 8] bytes, the first code in the
    lowest bits; those of several runs in blocks."""
    if not form.is_packed:
        return codes
    if form.runs > 1:
        return packed_threes(codes)
    shifts = np.arange(0, 8, form.bits, dtype=np.uint8)
    return np.bitwise_or.reduce(
        codes.reshape(len(codes), -1, len(shifts)) << shifts, axis=2
    )


def unpack(packed: Bytes, form: Format) -> Bytes:
    """The inverse of ``pack``."""
    if not form.is_packed:
        return packed
    if form.runs > 1:
        return unpacked_threes(packed)
    shifts = np.arange(0, 8, form.bits, dtype=np.uint8)
    mask = np.uint8((1 << form.bits) - 1)
    return ((packed[..., None] >> shifts) & mask).reshape(len(packed), -1)


def byte_codes(form: Format) -> Bytes:
    """[runs, 256, together]: what a byte of each run adds to the codes that it is part
    of."""
    runs = form.runs
    every_byte = np.arange(256)
    alone = np.zeros((runs, 256, runs), np.uint8)
    for run in range(runs):
        alone[run, :, run] = every_byte
    return unpack(alone.reshape(-1, runs), form).reshape(runs, 256, -1)


def packed_threes(codes: Bytes) -> Bytes:
    """[rows, n] codes below 8 as [rows, 3 n / 8] bytes; n is a multiple of 8."""
    packed: list[Bytes] = []
    for first in range(0, codes.shape[1], BLOCK):
        packed.append(_packed_block(codes[:, first : first + BLOCK]))
    return np.concatenate(packed, axis=1)


def _packed_block(codes: Bytes) -> Bytes:
    rows = len(codes)
    eights = codes.reshape(rows, -1, 8)
    first = eights[..., 0:6:2]
    second = eights[..., 1:6:2]
    six = eights[..., 6]
    seven = eights[..., 7]
    top_six = six >> 2
    top_seven = seven >> 2
    last = np.stack([six & 3, seven & 3, top_six | top_seven << 1], axis=-1)
    runs = first | second << 3 | last << 6
    return runs.transpose(0, 2, 1).reshape(rows, -1).astype(np.uint8)


def unpacked_threes(packed: Bytes) -> Bytes:
    """The inverse of ``packed_threes``."""
    size = BLOCK * 3 // 8
    codes: list[Bytes] = []
    for first in range(0, packed.shape[1], size):
        codes.append(_unpacked_block(packed[:, first : first + size]))
    return np.concatenate(codes, axis=1)


def _unpacked_block(packed: Bytes) -> Bytes:
    rows = len(packed)
    first, second, third = packed.reshape(rows, 3, -1).transpose(1, 0, 2)
    tops = third >> 6
    top_six = (tops & 1) << 2
    top_seven = (tops & 2) << 1
    codes: list[npt.NDArray[np.integer]] = []
    for run in (first, second, third):
        codes.append(run & 7)
        codes.append(run >> 3 & 7)
    codes.append(first >> 6 | top_six)
    codes.append(second >> 6 | top_seven)
    return np.stack(codes, axis=-1).reshape(rows, -1).astype(np.uint8)


def piece_places(form: Format, count: int, unit: int) -> Places:
    """[count / unit, runs]: which pieces of a row of ``count`` codes hold each ``unit``
    of them. A piece is the bytes that a unit has in one run; unit divides count and
    BLOCK."""
    units = np.arange(count // unit)[:, None]
    run = np.arange(form.runs)
    if form.runs == 1:
        return units + run
    block = units * unit // BLOCK
    first_unit = block * BLOCK // unit
    in_run = np.minimum(BLOCK, count - block * BLOCK) // unit
    before = form.runs * first_unit
    return before + run * in_run + units - first_unit


def lane_pieces(
    form: Format, rank: int, page: int, channels: Places, unit: int
) -> Places:
    """Numbers of the pieces (``piece_places``) of a lane: [P, units of
    ``channels`` * runs] along the rank, [1, channels * units * runs] along the tokens.
    ``channels`` are padded."""
    pieces = piece_places(form, page if form.along_tokens else rank, unit)
    if form.along_tokens:
        firsts = channels[:, None, None] * pieces.size
        places = firsts + pieces
        return places.reshape(1, -1)
    units = channels[::unit] // unit
    firsts = np.arange(page)[:, None, None] * pieces.size
    places = firsts + pieces[units]
    return places.reshape(page, -1)
