"""The CUDA kernels that multiply a few rows with weights that are codes, run on a CPU
thread by thread (tests/native_cpu/emulated)."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.native.library import ABI_VERSION, Status
from kvlathe.runtime.native.products import MOST_ROWS, ProductArgs
from kvlathe.runtime.sessions.torch_cuda.model import rows as rows_module
from kvlathe.runtime.sessions.torch_cuda.model.coded import code_table
from kvlathe.runtime.sessions.torch_cuda.model.rows import NativeRows
from tests.support.emulated import emulated_kernels
from tests.support.product_laws import (
    Shape,
    any_codes,
    identity_reads_every_weight,
    many_rows_multiply_the_same_weights,
    products_are_those_of_the_numbers,
)


class Products:
    """The calls of products.h, by the emulated kernels. ``calls``: their names."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self.kernels = kernels
        self.calls: list[str] = []

    def call(self, name: str, *given: object) -> None:
        status = Status()
        self.calls.append(name)
        if getattr(self.kernels, f"kvlathe_{name}")(*given, byref(status)):
            raise KvlatheError(name, status.message.decode(), "report this")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Products:
    return Products(
        emulated_kernels(tmp_path_factory.mktemp("host"), "products", "-O1")
    )


@pytest.fixture(scope="module")
def rows(library: Products) -> NativeRows:
    calls: Any = library
    return NativeRows(calls)


SHAPES = st.one_of(
    st.builds(
        Shape,
        inputs=st.sampled_from([16, 80, 2048, 2064]),
        outputs=st.sampled_from([(16,), (33, 5), (64,)]),
        group=st.just(0),
    ),
    st.builds(
        Shape,
        inputs=st.sampled_from([128, 256, 4224]),
        outputs=st.sampled_from([(16,), (33, 5), (64,)]),
        group=st.sampled_from([32, 64, 128]),
        zeros=st.booleans(),
    ),
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(shape=SHAPES, tokens=st.sampled_from([1, 3, 7, 8, 16, 19]), seed=st.integers(0))
def test_products_of_few_rows_are_those_of_the_numbers(
    rows: NativeRows,
    monkeypatch: pytest.MonkeyPatch,
    shape: Shape,
    tokens: int,
    seed: int,
) -> None:
    monkeypatch.setattr(rows_module, "FEW_ROWS", {8: 64, 4: 64})
    torch.manual_seed(seed % 2**32)
    products_are_those_of_the_numbers(rows, shape, tokens, "cpu")


@pytest.mark.parametrize("zeros", [False, True])
def test_many_rows_of_4_bits(
    rows: NativeRows,
    library: Products,
    monkeypatch: pytest.MonkeyPatch,
    zeros: bool,
) -> None:
    monkeypatch.setattr(rows_module, "SLICE", 4096)
    library.calls.clear()
    shape = Shape(128, (40, 30), 32, zeros)
    many_rows_multiply_the_same_weights(rows, shape, 65, "cpu")
    assert library.calls == ["cuda_widen"] * 3
    identity_reads_every_weight(rows, code_table(any_codes(shape, "cpu")))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"element": 2}, "F16 elements only"),
        ({"bits": 3}, "8 bits or 4"),
        ({"inputs": 40}, "multiple of 32"),
        ({"outputs": 24}, "multiple of 32 and outputs of 16"),
        ({"group": 48}, "power of two from 32"),
        ({"scale_stride": 8}, "hold all outputs"),
        ({"rows": MOST_ROWS + 1}, "up to 16 rows"),
        ({"x": None}, "x is null"),
        ({"x_stride": 60}, "16 bytes"),
    ],
)
def test_products_in_formats_without_a_kernel_are_refused_in_words(
    library: Products, changes: dict[str, int | None], words: str
) -> None:
    space = torch.zeros(1 << 14, dtype=torch.uint8)
    at = space.data_ptr()
    args = ProductArgs(ABI_VERSION, 1, 1, 64, 16, 4, 32, 16)
    args.x, args.x_stride, args.codes, args.scales = at, 64, at, at
    args.out, args.out_stride = at + 8192, 16
    library.call("cuda_product", byref(args))
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(KvlatheError, match=words):
        library.call("cuda_product", byref(args))
