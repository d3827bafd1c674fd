"""Codes stand for the weights they were made of, as nearly as their format allows, and
MatMulNBits multiplies what they stand for."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from kvlathe.export.model.quantize import Grid, quantize
from kvlathe.layers.coded_weight import CodedWeight, middle, pack, unpack
from kvlathe.plan.weight_formats import WeightFormat

FP8 = WeightFormat("fp8", 0)
FORMS = st.builds(
    WeightFormat,
    st.sampled_from(["int8", "int4"]),
    st.sampled_from([16, 32, 64]),
    st.booleans(),
)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """[N, K], heavy-tailed, some groups of zeros; K need be no multiple of a group."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 150))
    numbers = rng.standard_t(3, shape) * draw(st.sampled_from([1e-3, 1.0, 30.0]))
    numbers[:, : draw(st.integers(0, shape[1]))] *= draw(st.sampled_from([0.0, 1.0]))
    return torch.from_numpy(numbers.astype(np.float32))


def spread(scales: Tensor, form: WeightFormat, inputs: int) -> Tensor:
    """The scale of each weight."""
    return scales.float().abs().repeat_interleave(form.group, 1)[:, :inputs]


@given(weights(), FORMS)
def test_eight_bits_lie_within_half_a_step(weight: Tensor, form: WeightFormat) -> None:
    form = WeightFormat("int8", form.group, form.zeros)
    coded = quantize(weight, form, torch.float32)
    error = (coded.matrix(weight.shape[1]) - weight).abs()
    assert bool((error <= 0.501 * spread(coded.scales, form, weight.shape[1])).all())


@given(weights(), FORMS)
def test_four_bits_err_no_more_than_plain_rounding(
    weight: Tensor, form: WeightFormat
) -> None:
    form = WeightFormat("int4", form.group, form.zeros)
    coded = quantize(weight, form, torch.float32)
    error = (coded.matrix(weight.shape[1]) - weight).square()
    # The largest of a group is code -8; what lies beyond 7 on the other side is cut.
    inputs = weight.shape[1]
    padded = torch.nn.functional.pad(weight, (0, -inputs % form.group))
    groups = padded.unflatten(1, (-1, form.group))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    step = torch.where(largest == 0, 1.0, largest / -8)
    plain = ((groups / step).round().clamp(-8, 7) * step - groups).square().sum(-1)
    whole = torch.nn.functional.pad(error, (0, -inputs % form.group))
    found = whole.unflatten(1, (-1, form.group)).sum(-1)
    assert bool((found <= plain * 1.001 + 1e-9 * largest.squeeze(-1).square()).all())


@given(weights())
def test_fp8_keeps_four_binary_digits(weight: Tensor) -> None:
    coded = quantize(weight, FP8, torch.float16)
    error = (coded.matrix(weight.shape[1]) - weight).abs()
    least = coded.scales * 2.0**-10  # half of e4m3's smallest number
    assert bool((error <= torch.maximum(weight.abs() / 16, least) * 1.001).all())


@given(st.integers(0, 1 << 20), FORMS, st.integers(1, 3), st.sampled_from([1, 2]))
def test_weights_on_a_checkpoints_grid_keep_their_codes(
    seed: int, form: WeightFormat, groups: int, times: int
) -> None:
    """The grid of a checkpoint, whose groups may be larger; what is folded leaves it."""
    torch.manual_seed(seed)
    form = WeightFormat(form.name, form.group, True)
    inputs = groups * times * form.group
    codes = torch.randint(0, 1 << form.bits, (inputs, 5))
    scales, zeros = torch.rand(groups, 5) + 0.1, torch.randint(1, 15, (groups, 5))
    of_group = torch.arange(inputs) // (times * form.group)
    weight = (codes - zeros[of_group]) * scales[of_group]
    grid = Grid(scales, zeros.float())
    found = quantize(weight.T.contiguous(), form, torch.float32, grid)
    kept = unpack(found.codes, form.bits).flatten(1)
    assert torch.equal(kept, codes.T.to(torch.uint8))
    moved = (weight + 0.3 * scales[of_group]).T.contiguous()
    left = quantize(moved, form, torch.float32, grid)
    own = quantize(moved, form, torch.float32)
    assert torch.equal(left.codes, own.codes) and torch.equal(left.scales, own.scales)


@given(st.integers(1, 40), st.sampled_from([4, 8]), st.integers(0, 1 << 20))
def test_unpacking_codes_undoes_packing(count: int, bits: int, seed: int) -> None:
    torch.manual_seed(seed)
    numbers = torch.randint(0, 1 << bits, (3, count), dtype=torch.uint8)
    assert torch.equal(unpack(pack(numbers, bits), bits)[:, :count], numbers)


def product(x: Tensor, coded: CodedWeight, form: WeightFormat) -> Tensor:
    """x W by ONNX Runtime's MatMulNBits, rows as 8-bit integers."""
    parts = {"codes": coded.codes, "scales": coded.scales, "zeros": coded.zeros}
    given = {name: part for name, part in parts.items() if part is not None}
    outputs, inputs = len(coded.codes), x.shape[1]
    node = helper.make_node(
        "MatMulNBits",
        ["x", *given],
        ["y"],
        domain="com.microsoft",
        K=inputs,
        N=outputs,
        bits=form.bits,
        block_size=form.group,
        accuracy_level=4,
    )
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", ["T", inputs]), ("y", ["T", outputs]))
    ]
    fixed = [numpy_helper.from_array(x.numpy(), name) for name, x in given.items()]
    graph = helper.make_graph([node], "one", values[:1], values[1:], fixed)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    session = ort.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return torch.from_numpy(np.asarray(session.run(None, {"x": x.numpy()})[0]))


@settings(max_examples=25)
@given(weights(), FORMS, st.sampled_from([1, 3]))
def test_onnx_runtime_multiplies_what_the_codes_stand_for(
    weight: Tensor, form: WeightFormat, rows: int
) -> None:
    """Within what rounding each group of a row to 8 bits may cost."""
    coded = quantize(weight, form, torch.float32)
    if coded.zeros is not None:
        shifted = torch.full_like(coded.zeros, middle(form.bits) + 1)
        if form.bits == 4:
            shifted |= shifted << 4
        coded = CodedWeight(coded.codes, coded.scales, shifted, form.bits)
    torch.manual_seed(rows)
    x = torch.randn(rows, weight.shape[1])
    matrix = coded.matrix(weight.shape[1]).double()
    expected = x.double() @ matrix.T
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % form.group))
    largest = groups.unflatten(1, (-1, form.group)).abs().amax(-1)
    steps = largest.repeat_interleave(form.group, 1)[:, : x.shape[1]] / 127
    allowed = 0.51 * steps.double() @ matrix.abs().T
    # Sums in float32 of numbers as large as the codes.
    largest_code = spread(coded.scales, form, x.shape[1]) * 2.0**form.bits
    allowed += 1e-5 * x.double().abs() @ largest_code.double().T + 1e-30
    error = (product(x, coded, form).double() - expected).abs()
    assert bool((error <= allowed).all())


@pytest.mark.parametrize("form", [WeightFormat("int4", 64), WeightFormat("int8", 128)])
def test_bytes_of_coded_weights_are_counted_as_they_lie(form: WeightFormat) -> None:
    coded = quantize(torch.randn(7, 300), form, torch.float16)
    size = coded.codes.nbytes + coded.scales.nbytes
    assert form.bytes_of(300, 7, 2) == size
