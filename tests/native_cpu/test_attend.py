"""The native op is the eager op: every instruction set, any mix of prefill and decode, over poisoned pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import Bucket, Lane, Tier
from kvlathe.runtime.native import Native
from tests.attend_cases import Case, cases, plan_of
from tests.native_cpu.library import AVX2, AVX512, AVX512_VNNI, PORTABLE, Call, Refused

ISAS = {"portable": PORTABLE, "avx2": AVX2, "avx512": AVX512, "avx512vnni": AVX512_VNNI}


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=80, deadline=None)
@given(case=cases(), threads=st.integers(1, 4))
def test_native_is_plain_attention(native: Native, isa: str, case: Case, threads: int) -> None:
    call = Call(case, ISAS[isa], threads)
    before = call.memory.copy()
    try:
        out, rows = call.run(native)
    except Refused as refusal:
        if "not available" in str(refusal):
            pytest.skip(str(refusal))
        raise
    expected, packed = case.expected()
    np.testing.assert_allclose(rows.astype(np.float64), packed, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(out, expected, rtol=3e-3, atol=3e-3)
    appended_where_promised(call, before, rows)


@settings(max_examples=80, deadline=None)
@given(case=cases().filter(lambda case: case.plan.probe is not None), threads=st.integers(1, 4))
def test_native_mass_is_what_observed_rows_attend(native: Native, case: Case, threads: int) -> None:
    call = Call(case, threads=threads)
    call.run(native)
    np.testing.assert_allclose(call.mass, call.expected_mass(), rtol=3e-3, atol=3e-3)


def appended_where_promised(call: Call, before: np.ndarray, rows: np.ndarray) -> None:
    """The step's rows, and nothing else, were written: at the places after each length in the fresh buckets."""
    case, plan, layout = call.case, call.case.plan, CacheLayout(call.case.plan)
    expected, size = before, rows.dtype.itemsize
    ranks = np.array([(lane.rank_k, lane.rank_v) for lane in case.lanes])
    k_at = np.cumsum(ranks[:, 0]) - ranks[:, 0]
    v_at = ranks[:, 0].sum() + np.cumsum(ranks[:, 1]) - ranks[:, 1]
    for h, lane in enumerate(case.lanes):
        index = lane.layer * plan.model.kv_heads + lane.head
        bucket = next(s for s, x in enumerate(plan.buckets) if x.source is None and index in x.lanes)
        slab, row = layout.slab(bucket, index), 0
        for b, count in enumerate(case.queries):
            for i in range(count):
                page, place = divmod(int(case.lengths[b, bucket]) + i, plan.page_tokens)
                start = int(call.tables[bucket][b, page]) * layout.page_stride[bucket]
                for at, rank, column in ((slab.k, lane.rank_k, k_at[h]), (slab.v, lane.rank_v, v_at[h])):
                    data = np.ascontiguousarray(rows[row, column : column + rank]).view(np.uint8)
                    expected[start + at + place * rank * size :][: len(data)] = data
                row += 1
    np.testing.assert_array_equal(call.memory, expected)


def long_case(tier: Tier, page: int, seed: int) -> Case:
    """Decoding sequences long enough for several spans, and a chunk of several tiles, over a hot and a cold bucket."""
    lanes = [Lane(0, 0, 64, 48, 80, projected=True), Lane(0, 1, 64, 64, 16, projected=True)]
    buckets = [Bucket(0, (0, 1)), Bucket(1, (0, 1), source=0)]
    plan = plan_of(lanes, [Tier(32, 32), tier], buckets, 64, 3, page)
    return Case(plan, 0, [1, 200, 0, 1], [[7, 20 * page], [300, 1000 // page * page], [5, 0], [1500, 3]], seed, 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("page", [64, 128, 80])
@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (4, 8), (2, 2)])
def test_long_sequences_are_cut_into_spans_and_tiles(
    native: Native, isa: str, page: int, bits: tuple[int, int]
) -> None:
    tier = Tier(bits[0], bits[1], "rank", "token", 32, 16)
    case = long_case(tier, page, seed=page)
    results = [Call(case, ISAS[isa], threads).run(native)[0] for threads in (1, 4)]
    expected = case.expected()[0]
    np.testing.assert_allclose(results[0], expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    np.testing.assert_array_equal(results[0], results[1])
