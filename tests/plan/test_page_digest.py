"""Laws of a page's digest: it follows from the sums that the definition says, and a page
that is not what it was has another one."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.plan.page_digest import (
    ROW_WORDS,
    WEIGHTS,
    page_digest,
    row_sums,
)
from kvlathe.runtime.sessions.torch_cuda.page_sums import PageSums

ROW = 4 * ROW_WORDS


def by_definition(page: bytes) -> list[int]:
    """With Python's own numbers, which have no end."""
    page += bytes(-len(page) % 4)
    sums: list[int] = []
    for start in range(0, len(page), ROW):
        row = page[start : start + ROW]
        words = [
            int.from_bytes(row[i : i + 4], "little", signed=True)
            for i in range(0, len(row), 4)
        ]
        total = sum(w * int(r) for w, r in zip(words, WEIGHTS, strict=False))
        sums.append(total % 2**64)
    return sums


@settings(max_examples=20)
@given(st.integers(0, 3 * ROW), st.integers(0, 2**32 - 1))
def test_sums_are_those_of_the_definition(size: int, seed: int) -> None:
    page = np.random.default_rng(seed).bytes(size)
    expected = by_definition(page)
    assert [int(x) % 2**64 for x in row_sums(page)] == expected
    said = b"".join(x.to_bytes(8, "little") for x in expected)
    assert page_digest(page) == hashlib.sha256(said).hexdigest()


@pytest.mark.parametrize("stride", [128, ROW - 128, ROW, 5 * ROW + 384])
def test_torch_makes_the_same_sums_of_pages_of_a_pool(stride: int) -> None:
    """In any order, some of them twice, and more than one batch of them."""
    pool = np.random.default_rng(stride).integers(0, 256, 9 * stride + 128, np.uint8)
    sums = PageSums(torch.from_numpy(pool), batch=2 * stride)
    ids = [7, 0, 3, 3, 8]
    found = sums.of(stride, ids)()
    for page, of_page in zip(ids, found, strict=True):
        data = pool[page * stride : (page + 1) * stride].tobytes()
        assert (of_page == row_sums(data)).all()
    assert not len(sums.of(stride, [])())


@settings(max_examples=60)
@given(st.data())
def test_a_changed_word_or_two_changed_bits_are_found(data: st.DataObject) -> None:
    page = np.random.default_rng(1).integers(0, 256, 3 * ROW + 512, np.uint8)
    before = page_digest(page.tobytes())
    words = page.view(np.uint32)
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(words) - 1))
        words[place] ^= data.draw(st.integers(1, 2**32 - 1))
    else:
        place = st.integers(0, 8 * len(page) - 1)
        for bit in data.draw(st.sets(place, min_size=2, max_size=2)):
            words[bit // 32] ^= 1 << bit % 32
    assert page_digest(page.tobytes()) != before


def test_rows_that_change_places_and_zeros_are_told_apart() -> None:
    page = np.random.default_rng(2).bytes(4 * ROW)
    rows = [page[i : i + ROW] for i in range(0, len(page), ROW)]
    every = ["".join(map(str, order)) for order in itertools.permutations(range(4))]
    digests = {page_digest(b"".join(rows[int(i)] for i in order)) for order in every}
    assert len(digests) == len(every)
    assert page_digest(bytes(ROW)) != page_digest(bytes(2 * ROW))


def test_no_two_bits_of_a_row_cancel() -> None:
    """Bits b of two words change the sum by 2^b times the sum or the difference of two
    weights. That is no multiple of 2^64 for any b below 32, so never 0. Bits of other
    places give an odd multiple of the lower one."""
    low = (WEIGHTS.view(np.uint64) % np.uint64(2**33)).astype(np.int64)
    assert len(np.unique(low)) == ROW_WORDS
    assert len(np.unique(np.concatenate([low, 2**33 - low]))) == 2 * ROW_WORDS
    assert (WEIGHTS % 2 == 1).all()
