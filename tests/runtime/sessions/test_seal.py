"""Laws of sealing: codes are what the layout says, and an engine that seals computes
with exactly those numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import FITS, matrices, pack, unpack
from kvlathe.plan.formats import NORMAL, NORMAL_TOP, Bits, Format, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.plan.noise import noise, noise_key
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.prompt import Whole
from kvlathe.runtime.scheduling.sequence import PrefillChunk, Sequence
from kvlathe.runtime.sessions.host.pages import HostPages, check_supported
from kvlathe.runtime.sessions.page_moves import FullPage
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.attend_cases import packed
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import (
    BACKENDS,
    HOT,
    at_once,
    decoder,
    forced,
    llm,
    model_shape,
    plan_for,
    plans,
    text,
)

Floats = npt.NDArray[np.float32]
PAGE = 32

tiers = st.builds(
    Tier,
    bits_k=st.sampled_from([2, 3, 4, 8, 16]),
    bits_v=st.sampled_from([2, 3, 4, 8, 16]),
    axis_k=st.sampled_from(["rank", "token"]),
    axis_v=st.sampled_from(["rank", "token"]),
    group_k=st.sampled_from([16, 32, 48]),
    group_v=st.sampled_from([16, 32]),
)


coded_tiers = st.builds(
    Tier,
    bits_k=st.sampled_from([2, 3, 4, 8, 16]),
    bits_v=st.sampled_from([2, 3, 4, 8, 16]),
    axis_k=st.just("rank"),
    axis_v=st.just("token"),
    group_k=st.sampled_from([16, 32, 48]),
    group_v=st.sampled_from([16, 32]),
    arithmetic=st.just("int"),
    sums=st.booleans(),
)


def small_plan(tier: Tier, hot: Tier) -> CompressionPlan:
    shape = ModelShape(1, 2, 2, 64, 64, 64, 256)
    lanes = (
        Lane(0, 0, 64, 48, 64, projected=True),
        Lane(0, 1, 64, 16, 80, projected=True),
    )
    groups = (Group((0, 1), hot, (tier,), SEAL),)
    return CompressionPlan(shape, lanes, groups, page_tokens=PAGE, prefill_chunk=PAGE)


def group_sizes(n: int, group: int, of_rank: bool) -> list[int]:
    """Near-equal multiples of 16 along the rank, full groups and a rest along the
    tokens."""
    count = math.ceil(n / group)
    if not of_rank:
        return [min(group, n - i * group) for i in range(count)]
    return [16 * (n // 16 // count + (i < n // 16 % count)) for i in range(count)]


def quantized(
    x: Floats, bits: int, axis: str, group: int
) -> tuple[Floats, list[int], list[tuple[float, float]]]:
    """Element by element: the values that x [tokens, rank] becomes, its codes and
    (scale, minimum) pairs in order."""
    rows = x if axis == "rank" else x.T
    out, codes, pairs = np.zeros_like(rows), [], []
    for r, row in enumerate(rows):
        at = 0
        for size in group_sizes(len(row), group, axis == "rank"):
            part = row[at : at + size]
            scale = float(
                np.float16((part.max() - part.min()) / np.float32(2**bits - 1))
            )
            low = float(np.float16(part.min()))
            for i, value in enumerate(part):
                code = (
                    min(max(round((float(value) - low) / scale), 0), 2**bits - 1)
                    if scale
                    else 0
                )
                codes.append(code)
                out[r, at + i] = code * scale + low
            pairs.append((scale, low))
            at += size
    return (out if axis == "rank" else out.T), codes, pairs


def fitted(x: Floats, form: Format) -> Floats:
    """Group by group: what x [tokens, rank] becomes with fixed levels and the scale that
    Lloyd's iteration finds."""
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        at = 0
        for size in group_sizes(len(row), form.group, True):
            part = row[at : at + size].astype(np.float64)
            out[token, at : at + size] = fitted_group(part, form)
            at += size
    return out


def as_floats(x: Floats) -> Floats:
    """Token by token: what x [tokens, rank] becomes in 8-bit floats under one scale."""
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        scale = np.float32(np.abs(row).max() / np.float32(448))
        half = np.float16(scale)
        while np.float32(half) < scale:
            half = np.nextafter(half, np.float16(np.inf))
        codes = (row / np.float32(half)).astype(ml_dtypes.float8_e4m3fn)
        out[token] = codes.astype(np.float32) * np.float32(half)
    return out


def fitted_group(x: npt.NDArray[np.float64], form: Format) -> npt.NDArray[np.float64]:
    """A number goes to the level nearest to its byte; of two, to the lower one."""
    table = np.array(NORMAL[form.bits])
    read, largest = x, NORMAL_TOP[form.bits] * math.sqrt(np.mean(x * x))
    for _ in range(FITS):
        half = float(np.float16(largest))
        byte = np.rint((x / half + 1) * 127.5)
        worth = table[np.abs(byte[:, None] - table).argmin(1)]
        levels = worth / 127.5 - 1
        read = half * levels
        largest = (x @ levels) / (levels @ levels)
    return read


@settings(max_examples=25)
@given(
    tier=tiers | coded_tiers,
    hot=st.sampled_from([Tier(16, 16), HOT]),
    seed=st.integers(0, 99),
)
def test_a_sealed_page_holds_the_codes_that_the_layout_promises(
    tier: Tier, hot: Tier, seed: int
) -> None:
    plan = small_plan(tier, hot)
    layout = CacheLayout(plan)
    host, random = HostPages(layout, 1 << 20), np.random.default_rng(seed)
    for pair in host.matrices[0].values():
        for part in pair:
            part.write(
                host.rows[0][3],
                random.normal(1, 2, (PAGE, part.rank)).astype(np.float32),
            )
    last = len(host.rows[1]) - 1  # buckets share the arena: far from page 3 of bucket 0
    host.seal([FullPage(0, 3, (last,), 0)])
    start = last * layout.page_stride[1]
    page = host.memory[start : start + layout.page_stride[1]]
    for index, (k, v) in host.matrices[0].items():
        offsets = layout.lane_offsets(1, index)
        cold = host.matrices[1][index]
        for x, bits, axis, group, data, meta, sums, part in (
            (
                k,
                tier.bits_k,
                tier.axis_k,
                tier.group_k,
                offsets.k,
                offsets.k_meta,
                offsets.k_sums,
                cold[0],
            ),
            (
                v,
                tier.bits_v,
                tier.axis_v,
                tier.group_v,
                offsets.v,
                offsets.v_meta,
                offsets.v_sums,
                cold[1],
            ),
        ):
            values, got = x.read(host.rows[0][3]), part.read(page)
            if bits == 16:
                np.testing.assert_array_equal(got, values.astype(np.float16))
                continue
            expected, codes, pairs = quantized(values, bits, axis, group)
            row = x.rank if axis == "rank" else PAGE
            stored = page[data : data + values.size * bits // 8]
            lines = unpack(stored.reshape(-1, row * bits // 8), part.format)
            np.testing.assert_array_equal(packed(lines, bits), stored)
            found = lines.ravel().tolist()
            halves = page[meta : meta + 4 * len(pairs)].view(np.float16).reshape(-1, 2)
            np.testing.assert_array_equal(halves, np.array(pairs, np.float16))
            assert (
                np.abs(np.array(found) - codes).max() <= 1
                and np.mean(np.array(found) != codes) < 0.01
            )  # ties
            if tier.sums:
                width = (
                    1 if bits + math.log2(group) <= 8 else 2
                )  # the sum of the widest group of the largest codes
                sizes = group_sizes(row, group, axis == "rank") * (len(found) // row)
                totals = [sum(part) for part in np.split(found, np.cumsum(sizes)[:-1])]
                stored = page[sums : sums + width * len(totals)].tobytes()
                assert [
                    int.from_bytes(stored[i : i + width], "little")
                    for i in range(0, len(stored), width)
                ] == totals
            step = max(scale for scale, _ in pairs)
            np.testing.assert_allclose(got, values, atol=0.51 * step + 0.01)
            np.testing.assert_allclose(got, expected, atol=1.01 * step)


@given(bits=st.sampled_from([2, 3, 4, 8]), seed=st.integers(0, 99))
def test_packing_comes_back(bits: Bits, seed: int) -> None:
    form = Format(bits, "rank", 16)
    codes = np.random.default_rng(seed).integers(0, 2**bits, (5, 48)).astype(np.uint8)
    np.testing.assert_array_equal(unpack(pack(codes, form), form), codes)
    np.testing.assert_array_equal(pack(codes, form).ravel(), packed(codes, bits))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_constant_group_is_exact(
    bits: Bits, rounding: Literal["nearest", "stochastic"]
) -> None:
    tier = Tier(bits, bits, "rank", "token", 16, 16, rounding=rounding)
    host = HostPages(CacheLayout(small_plan(tier, HOT)), 1 << 20)
    for pair in host.matrices[1].values():
        for part in pair:
            part.write(host.rows[1][0], np.full((PAGE, part.rank), -2.75, np.float32))
            assert (part.read(host.rows[1][0]) == -2.75).all()


@settings(max_examples=25)
@given(
    tier=tiers,
    seed=st.integers(0, 2**33),
    position=st.integers(0, 2**33),
    page=st.integers(0, 3),
)
def test_stochastic_codes_are_the_two_next_to_each_number_and_depend_on_the_token_alone(
    tier: Tier, seed: int, position: int, page: int
) -> None:
    plan = dataclasses.replace(
        small_plan(dataclasses.replace(tier, rounding="stochastic"), HOT), seed=seed
    )
    host, random = HostPages(CacheLayout(plan), 1 << 21), np.random.default_rng(seed)
    for index, cold in host.matrices[1].items():
        for part, other in zip(cold, host.matrices[0][index], strict=True):
            values = random.normal(1, 2, (PAGE, part.rank)).astype(np.float32)
            other.write(host.rows[0][page], values)
    last = len(host.rows[1]) - 1  # buckets share the arena: far from the fresh page
    for n, start in enumerate((position, position, position + PAGE)):
        host.seal([FullPage(0, page, (last - n,), start)])
    first, again, elsewhere = (host.rows[1][last - n] for n in range(3))
    assert np.array_equal(first, again)
    assert (tier.bits_k == tier.bits_v == 16) or not np.array_equal(first, elsewhere)
    for index, cold in host.matrices[1].items():
        for part, other in zip(cold, host.matrices[0][index], strict=True):
            if part.groups:
                step = (
                    part.read(first) * 0
                    + np.abs(part._metadata(first)[..., 0].astype(np.float32)).max()
                )
                assert (
                    np.abs(part.read(first) - other.read(host.rows[0][page]))
                    <= 1.01 * step + 0.01
                ).all()


def test_stochastic_rounding_has_no_bias() -> None:
    found = noise(noise_key(1, 2, 3, 0), 0, 4096, 64)
    assert found.min() >= 0 and found.max() < 1
    assert abs(found.mean() - 0.5) < 0.003 and abs(found.var() - 1 / 12) < 0.001
    flat = (found - 0.5).reshape(-1)
    for apart in (1, 2, 63, 64, 65, 4096):
        assert abs((flat[apart:] * flat[:-apart]).mean()) < 0.001
    assert np.array_equal(noise(7, 64, 8, 16), noise(7, 0, 72, 32)[64:, :16])


# -- through the model -----------------------------------------------------------------
def assert_same(logits: Floats, expected: Floats, kind: str = "sealed") -> None:
    """Equal to 1e-3 but for the rare number on the border of two codes, which float
    noise sends to either side. Where queries and shares are codes too there are more of
    them; a 4-bit cache itself moves these logits by 0.2.
    """
    rms, most = (5e-3, 0.5) if kind == "coded" else (1e-3, 2e-2)
    difference = np.abs(logits - expected)
    assert np.sqrt((difference**2).mean()) < rms and difference.max() < most


def dequantized_reference(kind: str, length: int, grid: int) -> Floats:
    """The unsealed engine, its full pages rounded in place by the element-wise
    quantizer where ``kind`` seals them."""
    plan = plans(model_shape())[kind]
    tier = plan.index.buckets[1].tier
    engine = llm("torch", "one")
    sequence = Sequence(
        list(text(length)),
        length,
        engine.pool.open(),
        Whole.cut(length, grid),
        Sampler(SamplingParams()),
    )
    found, done = [], 0
    while sequence.cached < length:
        count = sequence.next_tokens(length)
        reservation = engine.pool.reserve(sequence.table, count)
        found.append(
            engine.engine.run(
                [PrefillChunk(sequence, count, reservation, range(count))]
            )
        )
        assert isinstance(engine.session, HostPages)
        for page in sequence.table.pages[0][done : sequence.cached // 64]:
            for k, v in matrices(engine.layout, 0).values():
                for part, form in ((k, tier.k), (v, tier.v)):
                    row = engine.session.rows[0][page]
                    values = part.read(row)
                    if form.coding == "normal":
                        part.write(row, fitted(values, form))
                        continue
                    if form.coding == "float8":
                        part.write(row, as_floats(values))
                        continue
                    shape = form.bits, form.axis, form.group
                    part.write(row, quantized(values, *shape)[0])
        done = sequence.cached // 64
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("kind", "backend"),
    rest_nightly(
        itertools.product(["threes", "fixed", "floats"], BACKENDS),
        ("threes", "onnx"),
        ("fixed", "torch"),
        ("floats", "onnx"),
    ),
)
def test_an_engine_of_codes_is_the_dequantized_reference(
    backend: str, kind: str
) -> None:
    logits = llm(backend, kind).logits(text(200), range(200))
    assert_same(logits, dequantized_reference(kind, 200, 64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sealing_engine_equals_the_dequantized_reference_and_nearly_the_exact_one(
    backend: str,
) -> None:
    logits = llm(backend, "sealed").logits(text(200), range(200))
    assert_same(logits, dequantized_reference("sealed", 200, 64))
    exact = at_once(200)
    assert 1e-5 < np.abs(logits - exact).max() < 1.0
    assert (logits.argmax(-1) == exact.argmax(-1)).mean() > 0.97


@pytest.mark.parametrize(
    "kind",
    rest_nightly(["sealed", "sealed split", "coded"], "sealed split", "coded"),
)
def test_a_grid_of_one_page_is_decoding_token_by_token(kind: str) -> None:
    engine = llm("torch", kind)
    tokens = list(text(150))
    sequence = Sequence(
        tokens, 1, engine.pool.open(), Whole.cut(1, 512), Sampler(SamplingParams())
    )
    decoded = []
    for _ in range(150):
        reservation = engine.pool.reserve(sequence.table, 1, sequence.seals_after(1))
        decoded.append(
            engine.engine.run([PrefillChunk(sequence, 1, reservation, (0,))])[0]
        )
    engine.pool.release(sequence.table)
    assert_same(engine.logits(tokens, range(150)), np.stack(decoded), kind)


def logits_under(engine: LLM, step_tokens: int) -> Floats:
    """All logits of a 700-token prompt on the plan's own grid, no step larger than
    ``step_tokens``."""
    sequence = Sequence(
        list(text(700)),
        700,
        engine.pool.open(),
        Whole.cut(700, 512),
        Sampler(SamplingParams()),
    )
    found = []
    while sequence.cached < 700:
        count = sequence.next_tokens(step_tokens)
        reservation = engine.pool.reserve(
            sequence.table, count, sequence.seals_after(count)
        )
        found.append(
            engine.engine.run(
                [PrefillChunk(sequence, count, reservation, range(count))]
            )
        )
        assert sequence.table.lengths[1] == (
            0 if sequence.cached < 512 else 512 if sequence.cached < 700 else 640
        )
    engine.pool.release(sequence.table)
    return np.concatenate(found)


@pytest.mark.parametrize("kind", ["sealed", "coded"])
def test_when_pages_seal_does_not_depend_on_the_schedule(kind: str) -> None:
    engine = llm("torch", kind)
    assert_same(logits_under(engine, 1000), logits_under(engine, 150), kind)


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_of_sealed_plans_do_not_depend_on_neighbours(
    backend: str,
) -> None:
    """Also where rounding is stochastic: noise goes by the token's place in its own
    sequence."""
    engine, texts = llm(backend, "coded"), [text(150), text(70, 40), text(200, 300)]
    together = forced(
        engine, texts, [(64, 0, 64), (64, 64, 64), (22, 6, 64), (0, 0, 8)]
    )
    for one, found in zip(texts, together, strict=True):
        (alone,) = forced(engine, [one], [(64,)] * 4)
        assert_same(found, alone, "coded")


def test_an_engine_that_computes_on_codes_is_the_torch_decoder_that_does() -> None:
    logits, expected = (
        llm(backend, "coded").logits(text(200), range(200))
        for backend in ("onnx", "torch")
    )
    assert_same(logits, expected, "coded")
    exact = at_once(200)
    assert 1e-4 < np.sqrt(((logits - exact) ** 2).mean()) < 0.5
    assert (logits.argmax(-1) == exact.argmax(-1)).mean() > 0.8


def test_plans_that_this_runtime_cannot_keep_are_refused() -> None:
    shape = ModelShape(1, 2, 2, 32, 64, 64, 256)
    with pytest.raises(KvlatheError, match="a step writes one format"):
        check_supported(plan_for(shape, (Group((0, 1), Tier(16, 32)),)))


def test_dropping_tokens_from_groups_along_tokens_is_refused() -> None:
    host = HostPages(CacheLayout(decoder("sealed").plan), 1 << 22)
    with pytest.raises(KvlatheError, match="groups run along the tokens"):
        host.move(1, [0], 1, [1], np.zeros((8, 3), np.int64))
