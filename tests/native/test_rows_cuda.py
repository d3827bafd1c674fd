"""Norms and gated activations by the native kernels against float64; what they do not
take goes to torch."""

from __future__ import annotations

import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.torch_cuda.model.rows import FusedRows, NativeRows
from tests.native.library import Library

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.fixture(scope="module")
def native(library: Library) -> NativeRows:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    return NativeRows(CudaLibrary(Native.load(library.path)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(0, 64), (1, 8), (16, 4096), (3, 200), (700, 16384), (2, 8200)],
)
def test_the_rms_norm_kernel_rounds_once(
    native: NativeRows, dtype: torch.dtype, rows: int, columns: int
) -> None:
    x = (
        torch.randn(rows, columns + 8, device="cuda").mul(3).to(dtype)[:, :columns]
    )  # rows apart
    weight = torch.randn(columns, device="cuda").to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = native.rms_norm(x, weight, 1e-5)
    assert (
        (found.double() - exact).abs() <= 1.1 * ROUNDING[dtype] * exact.abs() + 1e-7
    ).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "columns"),
    [(0, 2, 64), (1, 1, 8), (16, 36, 128), (3, 5, 200), (700, 3, 256)],
)
def test_the_norm_of_heads_rounds_once(
    native: NativeRows, dtype: torch.dtype, rows: int, heads: int, columns: int
) -> None:
    width = heads * columns
    x = torch.randn(rows, width + 8, device="cuda").mul(3).to(dtype)[:, 8:]
    x = x.unflatten(1, (heads, columns))  # of a wider matrix, as q and k are
    weight = torch.randn(columns, device="cuda").to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(2, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = native.rms_norm(x, weight, 1e-5)
    assert found.is_contiguous()
    assert (
        (found.double() - exact).abs() <= 1.1 * ROUNDING[dtype] * exact.abs() + 1e-7
    ).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns"), [(0, 64), (1, 8), (16, 14336), (300, 2056)]
)
def test_the_gated_silu_kernel_rounds_once(
    native: NativeRows, dtype: torch.dtype, rows: int, columns: int
) -> None:
    both = torch.randn(rows, 2 * columns, device="cuda").mul(4).to(dtype)
    gate, up = both.double().chunk(2, 1)
    exact = gate * torch.sigmoid(gate) * up
    found = native.gated("silu", both[:, :columns], both[:, columns:])
    assert (
        (found.double() - exact).abs() <= 1.1 * ROUNDING[dtype] * exact.abs() + 1e-6
    ).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns"), [(0, 64), (1, 8), (16, 4096), (3, 200), (300, 14336)]
)
def test_rows_in_fp8_are_those_of_torch(
    native: NativeRows, dtype: torch.dtype, rows: int, columns: int
) -> None:
    x = torch.randn(rows, columns + 8, device="cuda").mul(3).to(dtype)[:, :columns]
    if rows > 2:
        x[1] = 0
    codes, scales = native.fp8(x)
    expected, of_rows = FusedRows().fp8(x)
    torch.testing.assert_close(scales, of_rows)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def test_norms_and_activations_without_a_kernel_go_to_torch(native: NativeRows) -> None:
    plain = FusedRows()
    x, weight = (
        torch.randn(5, 12, device="cuda").half(),
        torch.ones(12, device="cuda").half(),
    )
    torch.testing.assert_close(
        native.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6)
    )
    heads = torch.randn(5, 3, 16, device="cuda").half()
    torch.testing.assert_close(
        native.rms_norm(heads, weight.new_ones(16), 1e-6),
        plain.rms_norm(heads, weight.new_ones(16), 1e-6),
    )
    both = torch.randn(5, 32, device="cuda").half()
    gate, up = both.chunk(2, 1)
    for activation, second in (("gelu", up), ("silu", up.contiguous())):
        torch.testing.assert_close(
            native.gated(activation, gate, second),
            plain.gated(activation, gate, second),
        )


def test_a_row_that_is_misplaced_is_refused_in_words(native: NativeRows) -> None:
    x = torch.zeros(100, device="cuda").half()
    with pytest.raises(KvlatheError, match="aligned"):
        native._run("cuda_rms_norm", x[1:33].view(2, 16), 16, x[:16], 1e-5)
