"""The library's coder of pages beside its NumPy form: each reads what the other wrote, with
every instruction set; and what neither wrote is refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.native.coding import Coder, Matrix, Part
from kvlathe.runtime.native.library import Native
from tests.support.coded_pages import decode_page, encode_page, numbers_of

Bytes = npt.NDArray[np.uint8]
ISAS = ("portable", "avx2", "avx512")
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 6e-8, -6e-8, 65504], np.float16)


def random_parts(rng: np.random.Generator) -> tuple[list[Part], int]:
    """Parts of every width, row by row and column by column, and what they fill."""
    parts: list[Part] = []
    at = 0
    for _ in range(rng.integers(1, 5)):
        rows = int(rng.choice([1, 3, 8, 16, 24, 32, 64, 65]))
        width = int(rng.choice([1, 2, 4]))
        turn = int(rng.integers(2)) if width > 1 else 0
        matrices: list[Matrix] = []
        for _ in range(rng.integers(1, 4)):
            columns = int(rng.integers(1, 20))
            strides = (columns * width, width)
            if rng.integers(2):
                strides = (width, rows * width)
            matrices.append(Matrix(at, columns, *strides))
            at += rows * columns * width
        parts.append(Part(rows, width, turn, tuple(matrices)))
    return parts, at


def numbers(kind: str, size: int, rng: np.random.Generator) -> Bytes:
    """``size`` bytes: halves, with those that are no numbers; few symbols; or noise."""
    if kind == "halves":
        x = rng.standard_normal(size // 2 + 1).astype(np.float16)
        x[:: max(1, len(x) // 9)] = rng.choice(SPECIAL)
        return x.view(np.uint8)[:size].copy()
    most = {"zeros": 1, "few": 5, "noise": 256}[kind]
    return rng.integers(0, most, size, dtype=np.uint8)


def rows_of(part: Part, matrix: Matrix) -> npt.NDArray[np.intp]:
    """The bytes of each row of a matrix [rows, bytes of a row]."""
    places = numbers_of(part, matrix)
    if matrix.column_stride <= matrix.row_stride:
        return places.reshape(part.rows, -1)
    by_column = places.reshape(matrix.columns, part.rows, part.width)
    return by_column.transpose(1, 0, 2).reshape(part.rows, -1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["halves", "zeros", "few", "noise"])
def test_each_reads_what_the_other_wrote(native: Native, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts, size = random_parts(rng)
    page = numbers(kind, size, rng)
    for part in parts:
        for matrix in part.matrices:
            for r in rng.integers(0, part.rows, part.rows // 2).tolist():
                places = rows_of(part, matrix)
                page[places[r]] = page[places[r // 2]]
    coder = Coder(native, parts, size)
    assert coder.decode(encode_page(page, parts)) == page.tobytes()
    coded = coder.encode(page)
    assert coder.decode(coded) == page.tobytes()
    assert np.array_equal(decode_page(coded, parts, size), page)


def columns_of_sizes(
    columns: int, rng: np.random.Generator
) -> tuple[list[Part], Bytes]:
    """Halves [64, columns], each channel of its own size: classes pay."""
    x = rng.standard_normal((64, columns)) * np.exp2(rng.integers(-6, 7, columns))
    part = Part(64, 2, 0, (Matrix(0, columns, 2 * columns, 2),))
    return [part], x.astype(np.float16).view(np.uint8).ravel()


@pytest.mark.parametrize("isa", ISAS)
def test_classes_save_what_channels_of_unlike_sizes_have_in_common(
    native: Native, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    parts, page = columns_of_sizes(1024, rng)
    monkeypatch.setenv("KVLATHE_ISA", isa)
    coder = Coder(native, parts, len(page))
    try:
        coded = coder.encode(page)
    except KvlatheError as error:
        pytest.skip(str(error))
    assert coder.decode(coded) == page.tobytes()
    # A sign, 2.6 bits of an exponent and two of a mantissa: of 8, and 8 more as they are.
    assert len(coded) < 0.87 * len(page)
    if isa == ISAS[0]:
        few, bytes_ = columns_of_sizes(256, rng)
        found = Coder(native, few, len(bytes_)).encode(bytes_)
        assert np.array_equal(decode_page(found, few, len(bytes_)), bytes_)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_bytes_are_refused_or_are_a_page(native: Native, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts, page = columns_of_sizes(128 * 2**seed, rng)
    coder = Coder(native, parts, len(page))
    coded = coder.encode(page)
    refused = 0
    second = 9 + len(page) // 2  # the first plane is as it is
    for at in [*range(9), *range(second, second + 300)]:
        wrong = bytearray(coded)
        wrong[at % len(wrong)] ^= int(rng.integers(1, 256))
        try:
            assert len(coder.decode(bytes(wrong))) == len(page)
        except KvlatheError as error:
            assert "cold page cannot be read" in str(error)
            refused += 1
    assert refused > 50
    for end in rng.integers(0, len(coded), 100).tolist():
        with pytest.raises(KvlatheError, match="cold page"):
            coder.decode(coded[:end])
    with pytest.raises(KvlatheError, match="version 1"):
        coder.decode(b"\1" + coded[1:])
    with pytest.raises(KvlatheError, match="no plane"):
        coder.decode(coded + b"0")


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Part(8, 3, 0, (Matrix(0, 1, 3, 3),)), "a part has a size"),
        (Part(8, 1, 1, (Matrix(0, 3, 3, 1),)), "a part has a size"),
        (Part(8, 2, 0, (Matrix(10, 1, 2, 2),)), "ends past its page"),
        (Part(8, 2, 0, (Matrix(0, 1, 0, 2),)), "a matrix has a size"),
        (Part(8, 2, 0, (Matrix(0, 1, 2, 2),)), "not all of it"),
    ],
)
def test_forms_that_cannot_be_are_refused(
    native: Native, part: Part, reason: str
) -> None:
    assert numbers_of(part, part.matrices[0]).shape[1] == part.width
    with pytest.raises(KvlatheError, match=reason):
        Coder(native, [part], 24)
