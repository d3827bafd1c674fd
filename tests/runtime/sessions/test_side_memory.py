"""What a session of the cuda backend keeps on a GPU beside weights and pages."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import Bucket
from kvlathe.plan.token_rules import Window
from kvlathe.runtime.sessions.gpu.side_memory import (
    COPY_HEADER,
    HALF,
    copies_bytes,
    room_for_copies,
    side_bytes,
)
from tests.support.fake_session import SHAPE
from tests.support.runtime_cases import plans

PLANS = plans(SHAPE)
CODED = PLANS["mixed"]
ENDLESS = 1 << 50


@given(
    name=st.sampled_from(["mixed", "sealed windows"]),
    tokens=st.integers(1, 3000),
    data=st.data(),
)
def test_room_holds_what_a_sequence_of_any_length_has_sealed(
    name: str, tokens: int, data: st.DataObject
) -> None:
    plan, layout = PLANS[name], CacheLayout(PLANS[name])
    length = data.draw(st.integers(0, tokens))
    room = copies_bytes(plan, tokens) - COPY_HEADER
    for layer in range(plan.model.layers):
        lanes = {i for i, lane in enumerate(plan.lanes) if lane.layer == layer}
        elements = sum(x.rank_k + x.rank_v for x in plan.active(layer))
        pages = [
            layout.held(i, length) // plan.page_tokens
            for i, bucket in enumerate(plan.buckets)
            if bucket.source is not None and lanes & set(bucket.lanes)
        ]
        assert sum(pages) * plan.page_tokens * elements * HALF <= room


@given(chunks=st.integers(1, 6), batch=st.integers(1, 8))
def test_room_is_for_as_many_pasts_as_a_step_has_whole_chunks(
    chunks: int, batch: int
) -> None:
    limits = Limits(batch, chunks * CODED.prefill_chunk, 4096, 4096)
    one = copies_bytes(CODED, 4096) - COPY_HEADER
    room = room_for_copies(CODED, limits, ENDLESS) - COPY_HEADER
    assert one > 0 and room == min(chunks, batch) * one


def test_windows_need_no_more_room_for_longer_sequences() -> None:
    plan = PLANS["sealed windows"]
    every, page = plan.buckets[0].lanes, plan.page_tokens
    windows = Bucket(1, every, 0, Window(page, page))
    plan = replace(plan, buckets=(Bucket(0, every), windows))
    short, long = (copies_bytes(plan, tokens) for tokens in (1 << 10, 1 << 20))
    assert 0 < short == long


@given(total=st.integers(0, 1 << 40))
def test_copies_take_a_small_part_of_a_gpu(total: int) -> None:
    limits = Limits(256, 8192, 1 << 20, 1 << 20)
    room = room_for_copies(CODED, limits, total)
    assert room <= total // 64 + COPY_HEADER


def test_a_plan_without_codes_and_stages_keeps_nothing() -> None:
    limits = Limits(256, 8192, 1 << 20, 1 << 20)
    assert side_bytes(PLANS["one"], limits, ENDLESS) == 0
