"""The native op is the eager op: every instruction set, any mix of prefill and decode,
over poisoned pages."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.plan.formats import Bits, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL, Window
from kvlathe.runtime.native.library import Native
from tests.native_cpu.library import (
    AVX2,
    AVX512,
    AVX512_VNNI,
    AVX_VNNI,
    NEON,
    NEON_DOT,
    PORTABLE,
    SVE,
    Call,
)
from tests.support.attend_cases import Array, Case, cases, plan_of
from tests.support.mixed_cases import FLOATS
from tests.support.nightly import rest_nightly

ISAS = {
    "portable": PORTABLE,
    "avx2": AVX2,
    "avxvnni": AVX_VNNI,
    "avx512": AVX512,
    "avx512vnni": AVX512_VNNI,
    "neon": NEON,
    "neondot": NEON_DOT,
    "sve": SVE,
}
"""Those that this machine lacks are skipped; test_aarch64.py has another machine."""


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=80)
@given(case=cases(), threads=st.integers(1, 4))
def test_the_native_op_is_softmax_attention_in_float64(
    native: Native, isa: str, case: Case, threads: int
) -> None:
    call = Call(case, ISAS[isa], threads)
    before = call.memory.copy()
    out, rows = call.run(native)
    expected, packed = case.expected()
    np.testing.assert_allclose(rows.astype(np.float64), packed, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(out, expected, rtol=3e-3, atol=3e-3)
    appended_where_promised(call, before, rows)


@settings(max_examples=80)
@given(
    case=cases().filter(lambda case: case.plan.index.observes),
    threads=st.integers(1, 4),
)
def test_native_mass_is_what_observed_rows_attend(
    native: Native, case: Case, threads: int
) -> None:
    call = Call(case, threads=threads)
    call.run(native)
    np.testing.assert_allclose(call.mass, call.expected_mass(), rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize(
    "tier",
    [
        Tier(16, 16),
        Tier(8, 8, "token", "token", 64, 64),
        Tier(4, 4, "rank", "rank", 64, 64),
    ],
    ids=str,
)
def test_one_key_of_a_latent_serves_every_query_head(
    native: Native, tier: Tier
) -> None:
    """As DeepSeek V3 has it: a latent of 512 and 64 dims that turn."""
    lane = Lane(0, 0, 576, 576, 512, "none", values_in_keys=True)
    plan = plan_of([lane], [Group((0,), Tier(32, 32), (tier,), SEAL)], 576, 64, 64)
    case = Case(plan, 0, [1, 3], [[7, 128], [30, 64]], seed=3)
    out, rows = Call(case).run(native)
    expected, packed = case.expected()
    np.testing.assert_allclose(rows, packed, rtol=2e-3, atol=2e-3)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3 * scale)


def appended_where_promised(call: Call, before: np.ndarray, rows: np.ndarray) -> None:
    """The step's rows, and nothing else, were written: at the places after each length
    in the fresh buckets."""
    case, plan, layout = call.case, call.case.plan, CacheLayout(call.case.plan)
    expected, size = before, rows.dtype.itemsize
    ranks = np.array([(lane.rank_k, lane.rank_v) for lane in case.lanes])
    k_at = np.cumsum(ranks[:, 0]) - ranks[:, 0]
    v_at = ranks[:, 0].sum() + np.cumsum(ranks[:, 1]) - ranks[:, 1]
    for h, lane in enumerate(case.lanes):
        index = lane.layer * plan.model.kv_heads + lane.head
        bucket = plan.index.hot_bucket[index]
        offsets, row = layout.lane_offsets(bucket, index), 0
        for b, count in enumerate(case.queries):
            for i in range(count):
                page, place = divmod(int(case.lengths[b, bucket]) + i, plan.page_tokens)
                start = int(call.tables[bucket][b, page]) * layout.page_stride[bucket]
                places = [(offsets.k, lane.rank_k, k_at[h])]
                if not lane.values_in_keys:
                    places.append((offsets.v, lane.rank_v, v_at[h]))
                for at, rank, column in places:
                    data = np.ascontiguousarray(rows[row, column : column + rank]).view(
                        np.uint8
                    )
                    expected[start + at + place * rank * size :][: len(data)] = data
                row += 1
    np.testing.assert_array_equal(call.memory, expected)


@functools.cache
def long_case(tier: Tier, page: int) -> tuple[Case, Array]:
    """Decoding sequences long enough for several spans, and a chunk of several tiles,
    over a hot and a cold bucket; and what attention gives."""
    lanes = [
        Lane(0, 0, 64, 48, 80, projected=True),
        Lane(0, 1, 64, 64, 16, projected=True),
    ]
    plan = plan_of(lanes, [Group((0, 1), Tier(32, 32), (tier,), SEAL)], 64, 3, page)
    lengths = [[7, 20 * page], [300, 1000 // page * page], [5, 0], [1500, 3]]
    case = Case(plan, 0, [1, 200, 0, 1], lengths, seed=page, spare=2)
    return case, case.expected()[0]


LONG_TIERS = [
    Tier(16, 16, "rank", "token", 32, 16),
    Tier(8, 8, "rank", "token", 32, 16),
    Tier(4, 8, "rank", "token", 32, 16),
    Tier(2, 2, "rank", "token", 32, 16),
    Tier(2, 4, "token", "rank", 16, 64),
    Tier(8, 8, "token", "rank", 32, 48),
    Tier(3, 3, "rank", "token", 32, 16),
    Tier(3, 3, "token", "rank", 64, 48),
    Tier(2, 4, "rank", "rank", 64, 32, coding_k="normal", coding_v="normal"),
    Tier(3, 3, "rank", "rank", 128, 128, coding_k="normal", coding_v="normal"),
    *FLOATS[:3],
]


PAGES = (64, 128, 80)
LONG_CASES = [
    pytest.param(
        tier,
        page,
        id=f"{tier.bits_k}-{tier.axis_k}-{tier.bits_v}-{tier.axis_v}-{page}",
        marks=[] if i % 3 == j else pytest.mark.nightly,
    )
    for i, tier in enumerate(LONG_TIERS)
    for j, page in enumerate(PAGES)
]
"""Each format with one size of pages; every size, nightly: what attention gives takes
half a second a case."""


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("tier", "page"), LONG_CASES)
def test_long_sequences_are_cut_into_spans_and_tiles(
    native: Native, isa: str, tier: Tier, page: int
) -> None:
    case, expected = long_case(tier, page)
    results = [Call(case, ISAS[isa], threads).run(native)[0] for threads in (1, 4)]
    np.testing.assert_allclose(
        results[0], expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max()
    )
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [96, 160, 192, 256])
def test_wide_heads_are_plain_attention(native: Native, isa: str, width: int) -> None:
    """Decodes and a chunk, over hot pages and codes."""
    cold = (Tier(8, 8, "rank", "token", 32, 16),)
    groups = [Group((0,), Tier(32, 32), cold, SEAL)]
    plan = plan_of([Lane(0, 0, width, width, width)], groups, width, 2, 32)
    case = Case(plan, 0, [1, 40, 1], [[7, 64], [0, 0], [30, 0]], seed=width)
    found = Call(case, ISAS[isa]).run(native)[0]
    expected = case.expected()[0]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * scale)


@functools.cache
def nearly_full_case(tier: Tier) -> tuple[Case, Array]:
    """Decodes and a chunk whose last cold page of 64 tokens lacks a few, with scores so
    small that no token has much more than its share; and what attention gives."""
    lanes = [
        Lane(0, 0, 64, 48, 80, projected=True),
        Lane(0, 1, 64, 64, 32, projected=True),
    ]
    plan = plan_of(lanes, [Group((0, 1), Tier(32, 32), (tier,), SEAL)], 64, 3, 64)
    lengths = [[7, 64 + 60], [3, 60], [0, 128 + 63], [60, 64 + 49], [9, 256 + 61]]
    case = Case(plan, 0, [1, 1, 1, 1, 20], lengths, seed=60)
    case.scale = 0.01
    return case, case.expected()[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [16, 64])
@pytest.mark.parametrize("bits", [4, 2])
def test_every_token_of_a_nearly_full_page_counts(
    native: Native, isa: str, bits: Bits, group: int
) -> None:
    """V is quantized along the tokens, so a group ends where a page does."""
    tier = Tier(bits, bits, "rank", "token", 32, group)
    case, expected = nearly_full_case(tier)
    found = Call(case, ISAS[isa]).run(native)[0]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * scale)


def largest(call: Call) -> Call:
    """The call with the largest code everywhere in its sealed pages, one scale, and
    queries whose channels are all alike after their projection."""
    plan, layout = call.case.plan, CacheLayout(call.case.plan)
    tier, size = plan.index.tiers[1], layout.page_stride[1]
    used = -(-call.case.lengths[:, 1:] // plan.page_tokens)
    held = np.arange(call.tables[1].shape[1]) < used
    for page in call.tables[1][held]:
        memory = call.memory[int(page) * size :][:size]
        for index in range(len(plan.lanes)):
            at = layout.lane_offsets(1, index)
            memory[at.k : at.k_meta] = memory[at.v : at.v_meta] = 255
            for form, part in (
                (tier.k, memory[at.k_meta : at.v]),
                (tier.v, memory[at.v_meta :]),
            ):
                halves = part.view(np.float16)
                halves[:] = 1
                if form.has_minimum:
                    halves[::2], halves[1::2] = 1 / (2**form.bits - 1), -0.5
    for name, value in {"q": 0.1, "cos": 1, "sin": 0, "proj_q": 1 / 64}.items():
        call.arrays[name][:] = value
    return call


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "tier", rest_nightly(LONG_TIERS[1:], *LONG_TIERS[1:4]), ids=str
)
def test_integers_hold_the_sums_of_the_largest_codes(
    native: Native, isa: str, tier: Tier
) -> None:
    case, _ = long_case(tier, 128)
    found = largest(Call(case, ISAS[isa])).run(native)[0]
    plain = largest(Call(case, PORTABLE)).run(native)[0]
    np.testing.assert_allclose(found, plain, rtol=1e-3, atol=1e-3)


@functools.cache
def windowed_case(window: Window, tier: Tier, page: int) -> tuple[Case, Array]:
    """Decodes, one of them in the middle of a chunk, and a chunk of several tiles, of a
    lane with a window beside one without; and what attention gives."""
    lanes = [
        Lane(0, 0, 32, 32, 48, projected=True),
        Lane(0, 1, 32, 16, 32, projected=True),
    ]
    hot, cold = Tier(32, 32), (tier,)
    groups = [Group((0,), hot, cold, window), Group((1,), hot, cold, SEAL)]
    plan = plan_of(lanes, groups, 32, 3, page)
    held = min(window.most, 20 * page)
    lengths = [[7, held, 20 * page], [page + 9, held + page, 0], [300, held, 9 * page]]
    lengths += [[page - 1, page, page], [40, 12 * page, 12 * page]]
    case = Case(plan, 0, [1, 1, 200, 300, 1], lengths, seed=page)
    return case, case.expected()[0]


WINDOWS = (
    Window(64, 128),
    Window(0, 0),
    Window(128, 64, 30),
    Window.of_tokens(200, 64),
    Window(64, 1 << 20),
)
WINDOWED = [
    pytest.param(
        window,
        tier,
        id=f"{window.words()}-{name}",
        marks=[] if i % 3 == j else pytest.mark.nightly,
    )
    for i, window in enumerate(WINDOWS)
    for j, (name, tier) in enumerate(
        zip(("by token", "by rank", "fixed"), LONG_TIERS[1::4], strict=True)
    )
]
"""Each window over one format; over every format, nightly."""


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("window", "tier"), WINDOWED)
def test_windows_of_long_sequences_are_masked_attention(
    native: Native, isa: str, window: Window, tier: Tier
) -> None:
    case, expected = windowed_case(window, tier, 64)
    results = [Call(case, ISAS[isa], threads).run(native)[0] for threads in (1, 4)]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(results[0], expected, rtol=1e-3, atol=1e-3 * scale)
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_alone_is_the_row_beside_others_to_the_bit(
    native: Native, isa: str
) -> None:
    """Alone its lanes are projected and attended by the same thread."""
    tier = LONG_TIERS[1]
    lanes = [
        Lane(0, 0, 32, 32, 48, projected=True),
        Lane(0, 1, 32, 16, 32, projected=True),
    ]
    groups = [
        Group((0,), Tier(32, 32), (tier,), Window(64, 128)),
        Group((1,), Tier(32, 32), (tier,), SEAL),
    ]
    plan = plan_of(lanes, groups, 32, 3, 64)
    case = Case(plan, 0, [1, 1, 5], [[9, 192, 256], [70, 0, 64], [3, 64, 64]], seed=5)
    beside, alone = Call(case, ISAS[isa], 2), Call(case, ISAS[isa], 2)
    expected, rows = beside.run(native)
    alone.args.tokens = alone.args.batch = 1
    out, own = alone.run(native)
    np.testing.assert_array_equal(out[0], expected[0])
    np.testing.assert_array_equal(own[0], rows[0])
    assert np.isnan(out[1:]).all()
