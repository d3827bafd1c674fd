"""What a session of the cuda backend keeps on a GPU beside weights and pages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlathe.plan.manifest import Limits
from kvlathe.runtime.sessions.gpu.side_memory import (
    COPY_HEADER,
    copies_bytes,
    room_for_copies,
    side_bytes,
)
from tests.support.fake_session import SHAPE
from tests.support.runtime_cases import plans

PLANS = plans(SHAPE)
CODED = PLANS["mixed"]
ENDLESS = 1 << 50


@given(chunks=st.integers(1, 6), batch=st.integers(1, 8), pages=st.integers(1, 1000))
def test_room_is_for_as_many_pasts_as_a_step_has_whole_chunks(
    chunks: int, batch: int, pages: int
) -> None:
    tokens = pages * CODED.page_tokens
    limits = Limits(batch, chunks * CODED.prefill_chunk, tokens, tokens)
    one = copies_bytes(CODED, tokens) - COPY_HEADER
    room = room_for_copies(CODED, limits, ENDLESS) - COPY_HEADER
    assert one > 0 and room == min(chunks, batch) * one


@given(total=st.integers(0, 1 << 40))
def test_copies_take_a_small_part_of_a_gpu(total: int) -> None:
    limits = Limits(256, 8192, 1 << 20, 1 << 20)
    room = room_for_copies(CODED, limits, total)
    assert room <= total // 64 + COPY_HEADER


def test_a_plan_without_codes_and_stages_keeps_nothing() -> None:
    limits = Limits(256, 8192, 1 << 20, 1 << 20)
    assert side_bytes(PLANS["one"], limits, ENDLESS) == 0
