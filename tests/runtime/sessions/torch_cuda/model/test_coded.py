"""Products with coded weights are products with what the codes stand for. On a machine
with a GPU, there too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.coded_blocks import CodedExperts, CodedMap
from kvlathe.export.model.coded_weights import CodedWeights
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.quantize import quantize
from kvlathe.export.model.weights_file import decoder_places, wiring
from kvlathe.layers.coded_weight import CodedWeight, middle
from kvlathe.plan.deal import deal
from kvlathe.plan.weight_formats import WeightFormat, WeightFormats
from kvlathe.runtime.sessions.torch_cuda.model.coded import (
    CodedLinear,
    code_table,
    coded_product,
    fp8_rows,
)
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.shards.slices import Slices
from tests.runtime.sessions.torch_cuda.model.test_cuda_decoder import (
    Reference,
    logits_of,
)
from tests.support.checkpoints import whole_plan

FP8 = WeightFormat("fp8", 0)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def takes_scales_of_rows() -> bool:
    """Whether torch multiplies e4m3 with a scale for each row on a CPU: 2.11 does not.
    The cuda backend needs that on GPUs, where it is older."""
    table = code_table([coded(16, 16, FP8, "cpu")])
    try:
        coded_product(torch.ones(1, 16), table, None)
    except RuntimeError as error:
        assert "per-tensor scaling" in str(error)
        return False
    return True


def needs_fp8(device: str) -> None:
    if device == "cpu" and not takes_scales_of_rows():
        pytest.skip(
            "this torch multiplies e4m3 on CPUs with one scale of all rows only"
        )


def coded(outputs: int, inputs: int, form: WeightFormat, device: str) -> CodedWeight:
    found = quantize(torch.randn(outputs, inputs) / inputs**0.5, form, torch.float16)
    zeros = found.zeros
    if zeros is not None:
        one_more = middle(4) + 1
        zeros = torch.full_like(zeros, one_more | one_more << 4).to(device)
    codes, scales = found.codes.to(device), found.scales.to(device)
    return CodedWeight(codes, scales, zeros, found.bits)


def product(x: Tensor, weights: list[CodedWeight]) -> Tensor:
    """In float64, of the numbers that codes stand for."""
    rows = [weight.matrix(x.shape[1]).double() for weight in weights]
    return x.double() @ torch.cat(rows).T


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=20, deadline=None)
@given(
    rows=st.sampled_from([1, 3, 40]),
    inputs=st.sampled_from([16, 48, 64, 208]),
    outputs=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 20),
)
def test_fp8_multiplies_rows_and_weights_of_e4m3(
    device: str, rows: int, inputs: int, outputs: list[int], seed: int
) -> None:
    """But for sums in float32: rows are rounded as fp8_rows does, and no further."""
    needs_fp8(device)
    torch.manual_seed(seed)
    weights = [coded(n, inputs, FP8, device) for n in outputs]
    x = torch.randn(rows, inputs, dtype=torch.float16, device=device)
    bias = torch.randn(sum(outputs), dtype=torch.float16, device=device)
    found = CodedLinear(weights, bias)(x)
    codes, scales = fp8_rows(x)
    expected = product(codes.float() * scales, weights) + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=4e-3, atol=4e-3)
    added = CodedLinear(weights, bias).add_to(found.clone(), x)
    torch.testing.assert_close(added, found + found)


@given(st.integers(0, 1 << 20), st.sampled_from([1e-3, 1.0, 300.0]))
def test_rows_in_fp8_keep_four_binary_digits(seed: int, size: float) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 32) * size
    x[0] = 0
    codes, scales = fp8_rows(x)
    error = (codes.float() * scales - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16, scales * 2.0**-10) * 1.001).all())


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=20, deadline=None)
@given(
    rows=st.sampled_from([1, 3, 40]),
    inputs=st.sampled_from([16, 64, 208]),
    outputs=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    form=st.builds(
        WeightFormat, st.just("int4"), st.sampled_from([32, 64, 128]), st.booleans()
    ),
    seed=st.integers(0, 1 << 20),
)
def test_four_bits_multiply_what_they_stand_for(
    device: str,
    rows: int,
    inputs: int,
    outputs: list[int],
    form: WeightFormat,
    seed: int,
) -> None:
    """Within sums in float32."""
    torch.manual_seed(seed)
    weights = [coded(n, inputs, form, device) for n in outputs]
    x = torch.randn(rows, inputs, device=device)
    found = CodedLinear(weights, None)(x)
    torch.testing.assert_close(
        found.double(), product(x, weights), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "form", "near"),
    [
        ("llama-biased-d80-mqa", WeightFormat("int4", 32, True), 1e-3),
        ("gpt2", WeightFormat("int4", 64), 1e-3),
        ("qwen3", FP8, 0.2),
    ],
)
def test_the_decoder_runs_on_codes(
    name: str, form: WeightFormat, near: float, reference: Reference
) -> None:
    """Its logits are those of the exporter's decoder with the same codes; in fp8 rows
    are rounded too."""
    if form is FP8:
        needs_fp8("cpu")
    checkpoint = Checkpoint(reference(name)[0])
    plan = whole_plan(checkpoint.spec)
    formats = WeightFormats(form)
    codes = CodedWeights(fold(checkpoint, plan, Basis()), formats, torch.float32)
    decoder = Decoder(checkpoint.spec, plan, formats=formats)
    decoder.load_state_dict(dict(codes))
    ids = torch.arange(3, 60)
    expected = decoder.logits(ids.tolist(), range(len(ids)))
    twin = TorchDecoder(wiring(checkpoint.spec, plan), dict(codes))
    found = logits_of(twin, decoder, ids)
    assert (found - expected).abs().max() <= near * expected.abs().max()


def test_gates_of_outputs_are_not_cut_for_several_gpus(reference: Reference) -> None:
    plan = whole_plan(Checkpoint(reference("afmoe")[0]).spec)
    with pytest.raises(KvlatheError, match="gates multiply"):
        Slices(deal(plan, 2), 0)("layers.0.out_gate.weight", torch.zeros(1))


def test_codes_are_not_cut_for_several_gpus(reference: Reference) -> None:
    plan = whole_plan(Checkpoint(reference("llama")[0]).spec)
    with pytest.raises(KvlatheError, match="its weights are codes"):
        Slices(deal(plan, 2), 0)("layers.0.q.codes", torch.zeros(1))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen2_moe", WeightFormat("int4", 32, True)),
        ("gpt_oss", WeightFormat("int4", 64)),
        ("glm4_moe", FP8),
        ("nemotron_h-latent", WeightFormat("int4", 32)),
    ],
)
def test_each_expert_has_codes_of_its_own(
    name: str, form: WeightFormat, reference: Reference
) -> None:
    """Each map's codes are those that it has alone. The decoder on codes is that of the
    numbers that they stand for, and routers stay numbers."""
    checkpoint = Checkpoint(reference(name)[0])
    plan = whole_plan(checkpoint.spec)
    formats = WeightFormats(form)
    plain = fold(checkpoint, plan, Basis())
    codes = CodedWeights(plain, formats, torch.float32)
    assert decoder_places(checkpoint.spec, plan, torch.float32, formats).keys() == {
        *codes
    }
    coded = Decoder(checkpoint.spec, plan, formats=formats)
    coded.load_state_dict(dict(codes))
    numbers = {x: plain[x] for x in codes if x in plain}
    for at, module in coded.named_modules():
        if isinstance(module, CodedExperts):
            numbers[at] = module.maps()
            last = quantize(plain[at][-1].T.contiguous(), form, torch.float32)
            inputs = plain[at].shape[1]
            torch.testing.assert_close(numbers[at][-1], last.matrix(inputs).T)
        elif isinstance(module, CodedMap):
            numbers[f"{at}.weight"] = module.weight.T.contiguous()
    assert any("experts.router" in x for x in numbers)
    decoder = Decoder(checkpoint.spec, plan)
    decoder.load_state_dict(numbers)
    ids = list(range(3, 40))
    expected = decoder.logits(ids, range(len(ids)))
    torch.testing.assert_close(coded.logits(ids, range(len(ids))), expected)
