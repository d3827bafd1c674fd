"""Memory that a session of the cuda backend keeps on a GPU beside weights and pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Window
from kvlathe.plan.manifest import Limits
from kvlathe.runtime.sessions.gpu.side_memory import (
    COPY_HEADER,
    HALF,
    SCRATCH_PAGES,
    copies_bytes,
    observing_bytes,
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
        elements = sum(x.rank_k + x.rank_v for x in plan.index.active(layer))
        pages = [
            layout.all_held(length)[i] // plan.page_tokens
            for i, bucket in enumerate(plan.index.buckets)
            if not bucket.is_hot and lanes & set(bucket.lanes)
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
    every, page = plan.index.buckets[0].lanes, plan.page_tokens
    own = replace(plan.groups[0], lanes=every, life=Window(page, page))
    plan = replace(plan, groups=(own,))
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


KINDS = ["compacted", "compacted alike", "sealed compacted"]


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(64, 1 << 14), keys=st.integers(64, 1 << 18))
def test_a_plan_that_compacts_has_room_for_what_its_steps_compute(
    kind: str, rows: int, keys: int
) -> None:
    """The arrays of the largest step, by their shapes; and pages of 16 bit that pairs
    pass."""
    plan = PLANS[kind]
    limits = Limits(8, rows, keys, keys)
    group, head = plan.model.group_size, plan.model.head_dim
    at_once = max(1, min(rows, (1 << 24) // (group * keys)))
    tile = np.broadcast_to(np.float32(0), (at_once, group, keys)).nbytes
    gathered = np.broadcast_to(np.float16(0), (keys, head)).nbytes
    wanted = 4 * tile + gathered + 2 * gathered
    fresh = [bucket for bucket in plan.index.buckets if bucket.is_hot]
    places = len(fresh) * keys + rows
    wanted += np.broadcast_to(np.float32(0), (len(plan.lanes), places)).nbytes
    found = observing_bytes(plan, limits)
    assert wanted <= found <= 2 * wanted + (len(plan.index.buckets) << 20)
    cold = any(not bucket.is_hot for bucket in plan.index.buckets)
    a_page = CacheLayout(plan).page_stride[0]
    scratch = (SCRATCH_PAGES + 1) * a_page if cold else 0
    assert side_bytes(plan, limits, ENDLESS, copies=False) == found + scratch
