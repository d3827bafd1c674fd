"""The places of 16-bit copies of sealed pages (prompt_copies.cu), with the kernel
compiled for a CPU, beside what abi.h says of them."""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.runtime.native.cuda import PromptPart, Prompts
from kvlathe.runtime.sessions.gpu.side_memory import COPY_OWNER
from tests.support.emulated import emulated_kernels

PAGE, WIDTH, MOST = 64, 6, 6
"""Tokens of a page, pages of a sequence and sequences at most."""
COPY = PAGE * 2 * (32 + 32)
"""Bytes of the copy of a page: its lane has ranks of 32."""
NONE, ALIGNED = -1, 128
Int32 = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated_kernels(tmp_path_factory.mktemp("copies"), "copies")


@dataclass
class Step:
    """``fresh`` [B] new tokens, ``sealed`` [parts, B] tokens, ``tables`` [parts, B,
    WIDTH], and ``whose`` [B], or None."""

    fresh: Int32
    sealed: Int32
    tables: Int32
    whose: Int32 | None

    @property
    def pages(self) -> Int32:
        return -(-self.sealed // PAGE)

    def expected(self, room: int) -> tuple[Int32, list[tuple[int, int]]]:
        """The places where the copies of each begin [parts, B], and the (part, page) of
        each."""
        parts, batch = self.sealed.shape
        own = np.arange(batch)
        makes = self.fresh >= 128 if self.whose is None else self.whose == own
        bases = np.full((parts, batch), NONE, np.int32)
        owners: list[tuple[int, int]] = []
        full = False
        for part in range(parts):
            for b in np.flatnonzero(makes & (self.sealed[part] > 0)):
                pages = self.tables[part, b, : self.pages[part, b]]
                full = full or len(owners) + len(pages) > room
                if full:
                    continue
                bases[part, b] = len(owners)
                owners += [(part, int(page)) for page in pages]
        if self.whose is not None:
            for b, of in enumerate(self.whose):
                bases[:, b] = bases[:, of] if of >= 0 else NONE
        return bases, owners


@st.composite
def steps(draw: st.DrawFn) -> Step:
    parts, batch = draw(st.integers(1, 2)), draw(st.integers(1, MOST))
    seed = draw(st.integers(0, 1 << 30))
    random = np.random.default_rng(seed)
    sealed = random.integers(0, WIDTH * PAGE + 1, (parts, batch)) * random.integers(
        0, 2, batch
    )
    fresh = random.choice([1, 64, 127, 128, 300], batch)
    tables = random.permutation(parts * batch * WIDTH).reshape(parts, batch, WIDTH)
    whose = None
    if draw(st.booleans()):
        own = random.integers(0, 2, batch).astype(bool)
        whose = np.where(own, np.arange(batch), NONE)
        for b in np.flatnonzero(~own):
            if own.any() and random.integers(0, 2):
                whose[b] = of = random.choice(np.flatnonzero(own))
                sealed[:, b] = np.minimum(sealed[:, b], sealed[:, of])
                tables[:, b] = tables[:, of]
        whose = whose.astype(np.int32)
    fresh, sealed, tables = (x.astype(np.int32) for x in (fresh, sealed, tables))
    return Step(fresh, sealed, tables, whose)


@given(step=steps(), room=st.integers(1, 2 * MOST * WIDTH))
def test_copies_lie_where_the_contract_says(
    kernels: ctypes.CDLL, step: Step, room: int
) -> None:
    parts, batch = step.sealed.shape
    tables = 4 * parts * batch
    header = ALIGNED + -(-tables // ALIGNED) * ALIGNED
    size = header + ALIGNED + room * (COPY + COPY_OWNER)
    space = np.full(size // 4 + ALIGNED, 0x7F7F7F7F, np.int32)
    first = -space.ctypes.data % ALIGNED // 4
    starts = np.concatenate([[0], np.cumsum(step.fresh)]).astype(np.int32)
    listed = np.flatnonzero(step.fresh >= 16).astype(np.int32)
    each = (PromptPart * parts)()
    for i, part in enumerate(each):
        part.page_table, part.page_table_stride = step.tables[i].ctypes.data, WIDTH
        part.lengths, part.lengths_stride = step.sealed[i].ctypes.data, 1
    prompts = Prompts(None, starts.ctypes.data, batch, 0, each)
    prompts.copies, prompts.copies_bytes = space.ctypes.data + 4 * first, size
    if step.whose is not None:
        prompts.copies_of = step.whose.ctypes.data
    slots = kernels.place(
        byref(prompts), parts, PAGE, listed.ctypes.data_as(ctypes.c_void_p), len(listed)
    )
    assert slots == room
    bases, owners = step.expected(room)
    found = space[first:]
    count, left = found[:2]
    assert found[32 : 32 + parts * batch].tolist() == bases.ravel().tolist()
    assert count == len(owners)
    at = header // 4
    assert found[at : at + 2 * count].reshape(-1, 2).tolist() == [
        list(x) for x in owners
    ]
    reads = (bases[:, listed] < 0) & (step.sealed[:, listed] > 0)
    assert left == reads.any()
