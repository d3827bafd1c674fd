"""Products with weights that are codes by the CUDA kernels, on a GPU: few rows, many, and
in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.torch_cuda.model.coded import CodedLinear, code_table
from kvlathe.runtime.sessions.torch_cuda.model.rows import NativeRows
from tests.native.library import Library
from tests.support.product_laws import (
    Shape,
    any_codes,
    identity_reads_every_weight,
    many_rows_multiply_the_same_weights,
    products_are_those_of_the_numbers,
)


@pytest.fixture(scope="module")
def rows(library: Library) -> NativeRows:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    return NativeRows(CudaLibrary(Native.load(library.path)))


OUTPUTS = st.sampled_from([(16,), (33, 5), (4096,), (1024, 4096, 1024)])
SHAPES = st.one_of(
    st.builds(
        Shape,
        inputs=st.sampled_from([16, 208, 4096, 14336]),
        outputs=OUTPUTS,
        group=st.just(0),
    ),
    st.builds(
        Shape,
        inputs=st.sampled_from([128, 384, 4096, 14336]),
        outputs=OUTPUTS,
        group=st.sampled_from([32, 64, 128]),
        zeros=st.booleans(),
    ),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(shape=SHAPES, tokens=st.integers(1, 16), seed=st.integers(0, 1 << 20))
def test_products_of_few_rows_are_those_of_the_numbers_on_a_gpu(
    rows: NativeRows, shape: Shape, tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    products_are_those_of_the_numbers(rows, shape, tokens, "cuda")


@pytest.mark.parametrize("tokens", [40, 65, 700])
def test_many_rows_of_4_bits(rows: NativeRows, tokens: int) -> None:
    shape = Shape(4096, (6144,), 64, True)
    many_rows_multiply_the_same_weights(rows, shape, tokens, "cuda")
    small = Shape(128, (40, 30), 32, True)
    identity_reads_every_weight(rows, code_table(any_codes(small, "cuda")))


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("tokens", [1, 8, 16, 100])
def test_a_graph_computes_the_same_each_time(
    rows: NativeRows, group: int, tokens: int
) -> None:
    """Products in a row, each of the answer of the one before: a kernel that asks for
    weights early still waits for its rows."""
    shape = Shape(4096, (4096,), group)
    linears = [
        CodedLinear(any_codes(shape, "cuda"), None, rows.product) for _ in range(4)
    ]
    x = torch.randn(tokens, 4096, device="cuda").half()
    y = x.new_empty(tokens, 4096)

    def chain() -> None:
        last = x
        for linear in linears:
            last = rows.rms_norm(linear(last), torch.ones_like(x[0]), 1e-6)
        y.copy_(last)

    chain()
    expected = y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
