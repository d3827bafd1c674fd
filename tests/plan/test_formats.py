"""One law for every number format: all implementations write and read the same codes.

The numpy codec is the reference. The torch simulation, the pages that the CPU library
seals and what the ONNX function reads are equal to it bit for bit. The CPU library's
attention is near the float64 reference. The CUDA kernels are held to the same list of
tiers in tests/native/test_cache_cuda.py, where there is a GPU.
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from kvlathe.export.attention.tables import LayerTables, PlanFacts
from kvlathe.export.onnx.attend import OPSET
from kvlathe.export.onnx.body import FLOAT, Body
from kvlathe.export.onnx.pages import PageReader, Places
from kvlathe.export.search import sealed
from kvlathe.plan.codec import (
    PageMatrix,
    e4m3_codes,
    element_places,
    matrices,
    worths,
)
from kvlathe.plan.formats import (
    ALIGN,
    DECODINGS,
    NORMAL,
    NORMAL_TOP,
    WHOLE_RANK,
    Axis,
    Bits,
    Format,
    Tier,
)
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.plan.noise import noise, noise_key
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cpu import PageWriter
from kvlathe.runtime.native.library import find
from kvlathe.runtime.sessions.host.pages import typed_views
from tests.native_cpu.library import Call, aligned
from tests.support.attend_cases import Case
from tests.support.format_cases import KINDS, TIERS, Kind, sealing_plan, tier_of

SPANS = st.sampled_from([1.0, 0.95, 0.65])
RANKS = st.sampled_from([16, 48, 80, 128])
PAGES = st.sampled_from([16, 48, 64])
EVERY = pytest.mark.parametrize("kind", KINDS, ids=str)


AXES: tuple[Axis, ...] = ("rank", "token")


@st.composite
def formats(draw: st.DrawFn, kind: Kind) -> Format:
    bits, coding = kind
    axis = draw(st.sampled_from(AXES))
    group = draw(st.sampled_from([16, 32, 48, 128]))
    if DECODINGS[coding].has_minimum:
        return Format(bits, axis, group, draw(SPANS))
    if DECODINGS[coding].has_one_group:
        group = WHOLE_RANK
    return Format(bits, "rank", group, coding=coding)


def matrix_of(form: Format, rank: int, page: int, key: int | None = None) -> PageMatrix:
    data = form.data_bytes(rank, page)
    return PageMatrix(form, 0, data, data, page, rank, key)


def numbers(seed: int, page: int, rank: int) -> np.ndarray:
    """Numbers of many sizes, exact in half precision; the first half of the tokens are
    alike."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(page, rank)) * 2.0 ** rng.integers(-6, 6, (page, 1))
    x[: page // 2] = x[:1]
    return x.astype(np.float16).astype(np.float32)


@EVERY
@given(data=st.data(), rank=RANKS, page=PAGES)
def test_bytes_hold_what_a_format_says(
    kind: Kind, data: st.DataObject, rank: int, page: int
) -> None:
    form = data.draw(formats(kind))
    assert form.data_bytes(rank, page) % ALIGN == 0
    assert form.data_bytes(rank, page) * 8 >= rank * page * form.bits
    assert form.meta_bytes(rank, page) % ALIGN == 0
    assert sum(form.group_sizes(rank, page)) in (
        0,
        rank if form.axis == "rank" else page,
    )
    assert bool(form.group_count(rank, page)) == form.is_coded
    assert form.token_major != form.along_tokens
    if form.is_coded:
        places, groups = element_places(form, rank, page)
        assert sorted(places.ravel()) == list(range(rank * page))
        assert {*groups.ravel()} == {*range(form.group_count(rank, page))}


@EVERY
@given(data=st.data(), rank=RANKS, page=PAGES, seed=st.integers(0, 99))
def test_decoded_numbers_are_near_and_encode_to_themselves(
    kind: Kind, data: st.DataObject, rank: int, page: int, seed: int
) -> None:
    """IEEE numbers come back as they are. Codes over a whole range are at most half a
    level off, and the error of half-precision metadata."""
    form = data.draw(formats(kind))
    matrix, values = matrix_of(form, rank, page), numbers(seed, page, rank)
    bytes_ = np.zeros(form.page_bytes(rank, page), np.uint8)
    matrix.write(bytes_, values)
    read = matrix.read(bytes_)
    if not form.is_coded:
        np.testing.assert_array_equal(read, values)
    elif form.span == 1.0 and form.has_minimum:
        along = 1 if form.along_rank else 0
        starts = np.cumsum((0, *matrix.groups[:-1]))
        high = np.maximum.reduceat(values, starts, axis=along)
        low = np.minimum.reduceat(values, starts, axis=along)
        step = np.repeat((high - low) / form.top, matrix.groups, axis=along)
        size = np.abs(values).max()
        assert (np.abs(read - values) <= 0.5 * step + 2e-3 * size).all()


def lloyd_max(count: int) -> np.ndarray:
    """The levels that lose least of a normal number: each is the mean of what is
    nearest to it."""

    def below(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    levels = np.linspace(-2, 2, count)
    for _ in range(3000):
        edges = [-40.0, *(levels[1:] + levels[:-1]) / 2, 40.0]
        mass = np.diff([below(x) for x in edges])
        levels = -np.diff([density(x) for x in edges]) / mass
    return levels


@pytest.mark.parametrize("bits", NORMAL)
def test_the_level_table_is_lloyd_and_max_s(bits: Bits) -> None:
    levels = lloyd_max(1 << bits)
    assert abs(NORMAL_TOP[bits] - levels[-1]) < 1e-6
    in_parts = 127.5 * (1 + levels / levels[-1])
    assert np.abs(in_parts - NORMAL[bits]).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("bits", NORMAL)
@given(rank=RANKS, seed=st.integers(0, 99))
def test_fixed_levels_are_the_nearest_and_their_scale_the_best(
    bits: Bits, rank: int, seed: int
) -> None:
    """In float64. The nearest level is looked up by a byte, so a code may be off by one
    part in 255. The scale loses no more than that of the numbers' deviation."""
    form, page = Format(bits, "rank", 128, coding="normal"), 16
    matrix, values = matrix_of(form, rank, page), numbers(seed, page, rank)
    bytes_ = np.zeros(form.page_bytes(rank, page), np.uint8)
    matrix.write(bytes_, values)
    read = matrix.read(bytes_).astype(np.float64)
    levels = 2 * np.array(NORMAL[bits]) / 255 - 1
    for token, row in enumerate(values.astype(np.float64)):
        stored = float(bytes_[matrix.meta :].view(np.float16)[token])
        guess = NORMAL_TOP[bits] * np.sqrt(np.mean(row * row))
        lost = np.abs(read[token] - row)
        apart, guessed = (
            np.abs(row[:, None] - size * levels).min(1) for size in (stored, guess)
        )
        part = stored * 2.1 / 255
        assert (lost <= apart + part).all()
        assert np.sum(lost**2) <= np.sum((guessed + part) ** 2)


@pytest.mark.parametrize(("bits", "loss"), [(2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_normal_numbers_lose_what_the_levels_promise(bits: Bits, loss: float) -> None:
    """Max 1960, table 1: the mean squared error of a normal number of variance 1. One
    scale of 128 numbers' own is a little better."""
    form, page = Format(bits, "rank", 128, coding="normal"), 512
    matrix = matrix_of(form, 128, page)
    values = np.random.default_rng(bits).normal(size=(page, 128)).astype(np.float32)
    bytes_ = np.zeros(form.page_bytes(128, page), np.uint8)
    matrix.write(bytes_, values)
    lost = np.square(matrix.read(bytes_) - values).sum() / np.square(values).sum()
    assert 0.9 * loss < lost < 1.01 * loss


FLOAT8 = Format(8, "rank", WHOLE_RANK, coding="float8")


def test_the_float_table_is_that_of_ocp() -> None:
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(worths(FLOAT8), theirs.astype(np.float32))


@given(rank=RANKS, seed=st.integers(0, 99), tiny=st.booleans())
def test_float_codes_are_those_of_ml_dtypes_under_the_least_half_that_clips_nothing(
    rank: int, seed: int, tiny: bool
) -> None:
    page, halves = 16, np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    matrix, values = matrix_of(FLOAT8, rank, page), numbers(seed, page, rank)
    values *= 2.0**-20 if tiny else 1
    values[3], values[5, 1:] = 0, 0
    bytes_ = np.zeros(FLOAT8.page_bytes(rank, page), np.uint8)
    matrix.write(bytes_, values)
    scales = bytes_[matrix.meta :][: 2 * page].view(np.float16)
    codes = bytes_[: page * rank].reshape(page, rank)
    for row, scale, own in zip(values, scales, codes, strict=True):
        least = np.searchsorted(halves, np.abs(row).max() / np.float32(448))
        assert scale == halves[least]
        shares = row / np.float32(scale) if scale else 0 * row
        theirs = shares.astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(own, theirs.view(np.uint8))
        read = theirs.astype(np.float32) * np.float32(scale)
        near = np.maximum(np.abs(row) / 16, np.float32(scale) * 2.0**-10)
        assert (np.abs(read - row) <= near).all()


@given(x=st.floats(width=32, allow_nan=False))
def test_every_number_becomes_the_nearest_8_bit_float(x: float) -> None:
    """The even one of two; what is too large, and infinities, the largest."""
    (code,) = e4m3_codes(np.array([x], np.float32))
    bounded = np.clip(np.float32(x), -448, 448)
    theirs = bounded.astype(ml_dtypes.float8_e4m3fn)
    assert code == theirs.view(np.uint8)


@EVERY
@given(
    data=st.data(), rank=RANKS, page=PAGES, seed=st.integers(0, 99), drawn=st.booleans()
)
def test_torch_reads_what_numpy_writes(
    kind: Kind, data: st.DataObject, rank: int, page: int, seed: int, drawn: bool
) -> None:
    form = data.draw(formats(kind))
    if not form.is_coded:
        return
    drawn = drawn and form.has_minimum
    key = noise_key(seed, 0, 0, 0) if drawn else None
    matrix, values = matrix_of(form, rank, page, key), numbers(seed, page, rank)
    bytes_ = np.zeros(form.page_bytes(rank, page), np.uint8)
    matrix.write(bytes_, values)
    dither = None if key is None else torch.from_numpy(noise(key, 0, page, rank))
    rounded = sealed.rounded(torch.from_numpy(values), form, page, dither)
    np.testing.assert_array_equal(rounded.numpy(), matrix.read(bytes_))


@EVERY
@given(
    data=st.data(),
    rank=RANKS,
    page=PAGES,
    seed=st.integers(0, 99),
    sums=st.booleans(),
    drawn=st.booleans(),
)
def test_the_cpu_library_writes_the_same_bytes(
    kind: Kind,
    data: st.DataObject,
    rank: int,
    page: int,
    seed: int,
    sums: bool,
    drawn: bool,
) -> None:
    native = find().native
    if native is None:
        pytest.skip("the CPU library is not built here")
    k, v = data.draw(formats(kind)), data.draw(formats(kind))
    affine = all(form.has_minimum for form in (k, v) if form.is_coded)
    drawn = drawn and affine
    sums = sums and k.along_rank and v.along_tokens and page % v.group == 0
    sums = sums and affine
    tier = dataclasses.replace(
        tier_of(k, v),
        arithmetic="int" if sums else "float",
        rounding="stochastic" if drawn else "nearest",
        sums=sums,
    )
    shape = ModelShape(1, 1, 1, rank, rank, 16, 1024)
    lanes = (Lane(0, 0, rank, rank, rank),)
    groups = (Group((0,), Tier(32, 32), (tier,), SEAL),)
    plan = CompressionPlan(shape, lanes, groups, page, page, seed)
    layout = CacheLayout(plan)
    source = aligned(np.zeros(layout.page_stride[0], np.uint8))
    expected = np.zeros(layout.page_stride[1], np.uint8)
    written = aligned(expected)
    for i, hot_matrix in enumerate(matrices(layout, 0)[0]):
        values = numbers(seed + i, page, rank)
        hot_matrix.write(source, values)
        matrices(layout, 1)[0][i].write(expected, values, 3 * page)
    PageWriter(native, plan).seal(0, 1, [(source, written, [3 * page])])
    np.testing.assert_array_equal(written, expected)


def page_reading_model(plan: CompressionPlan) -> tuple[bytes, Body]:
    """K and V [Hs, 1, B, N, R] of bucket 1, as the function ``kvlathe::Attend`` reads
    them."""
    body, tables = Body(), LayerTables(plan, 0)
    places = Places(body, plan, 1)
    reader = PageReader(plan, FLOAT, PlanFacts(plan), body)
    for x in "kv":
        body.output(x, reader.read(x, places))
    types = {"pool_f32": np.float32, "pool_f16": np.float16, "pool_u8": np.uint8}
    shapes = dict.fromkeys(types, (None, plan.index.unit))
    types |= dict.fromkeys(("lengths", "page_table_1"), np.int32)
    shapes |= dict.fromkeys(("lengths", "page_table_1"), (None, None))
    used = {name for node in body.nodes for name in node.input}

    def info(name: str) -> onnx.ValueInfoProto:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(types[name]))
        return helper.make_tensor_value_info(name, kind, shapes[name])

    graph = helper.make_graph(
        body.nodes,
        "pages",
        [info(name) for name in types if name in used],
        [helper.make_tensor_value_info(x, FLOAT, [None] * 5) for x in "kv"],
        [numpy_helper.from_array(tables[name], name) for name in used & tables.keys()],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString(), body


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_the_onnx_function_reads_what_numpy_writes(tier: Tier) -> None:
    """Two pages of two lanes; the page table names them in the other order."""
    plan = sealing_plan(tier)
    layout, page = CacheLayout(plan), plan.page_tokens
    stride = layout.page_stride[1]
    memory = np.zeros(2 * stride, np.uint8)
    lanes = matrices(layout, 1)
    for i in range(2):
        for lane, pair in lanes.items():
            for side, matrix in enumerate(pair):
                values = numbers(4 * i + 2 * lane + side, page, matrix.rank)
                matrix.write(memory[i * stride : (i + 1) * stride], values)
    model, body = page_reading_model(plan)
    feeds = dict(typed_views(memory, plan.index.unit))
    feeds["lengths"] = np.array([[0, 2 * page]], np.int32)
    feeds["page_table_1"] = np.array([[1, 0]], np.int32)
    used = {name for node in body.nodes for name in node.input}
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    read = session.run(None, {n: x for n, x in feeds.items() if n in used})
    for lane, pair in lanes.items():
        for side, matrix in enumerate(pair):
            pages = (memory[stride:], memory[:stride])
            expected = np.concatenate([matrix.read(bytes_) for bytes_ in pages])
            own = np.asarray(read[side])[lane, 0, 0, :, : matrix.rank]
            np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_the_cpu_library_attends_it(tier: Tier) -> None:
    """A decode row and a prompt, over hot tokens and whole sealed pages."""
    native = find().native
    if native is None:
        pytest.skip("the CPU library is not built here")
    case = Case(sealing_plan(tier), 0, [1, 9], [[7, 192], [30, 64]], seed=3)
    out, _ = Call(case).run(native)
    expected, _ = case.expected()
    atol = 3e-3 * float(np.abs(expected).max())
    np.testing.assert_allclose(out, expected, rtol=3e-3, atol=atol)
