"""The CUDA kernels that seal pages, run on a CPU thread by thread
(tests/native_cpu/emulated), write the bytes of kvlathe/plan/codec.py."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any, cast

import numpy as np
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import Bytes
from kvlathe.plan.formats import Tier
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.native.cuda import CudaLibrary, PageKernels
from kvlathe.runtime.native.library import Status
from tests.native_cpu.library import aligned
from tests.support.attend_cases import one_form
from tests.support.emulated import emulated_kernels
from tests.support.sealed_cases import (
    LATENTS,
    TIERS,
    WIDE,
    Jobs,
    pool_and_sealed,
    sealing,
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated_kernels(tmp_path_factory.mktemp("seal"), "seal")


class SealingLibrary:
    """Whose pages the emulated kernels seal: by ``cuda_seal`` or ``cuda_seal_listed``."""

    def __init__(self, kernels: ctypes.CDLL, name: str) -> None:
        self.kernels = kernels
        self.name = name

    def call(self, _: str, *given: Any) -> None:  # noqa: ANN401  (structures)
        status = Status()
        if getattr(self.kernels, f"kvlathe_{self.name}")(*given, byref(status)):
            raise KvlatheError(self.name, status.message.decode())


def seal(
    kernels: ctypes.CDLL, name: str, layout: CacheLayout, memory: Bytes, jobs: Jobs
) -> Bytes:
    """The pool after its pages have been sealed."""
    pool = aligned(memory)
    library = cast(CudaLibrary, SealingLibrary(kernels, name))
    writer = PageKernels(library, layout.plan, pool.ctypes.data, pool.nbytes)
    writer.seal(0, 1, jobs, 0)
    return pool


@pytest.mark.slow
@pytest.mark.parametrize("page", [64, 80])
@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_seal_writes_the_codes_of_the_codec(
    kernels: ctypes.CDLL, tier: Tier, page: int
) -> None:
    layout = sealing(tier, page)
    memory, jobs, sealed = pool_and_sealed(layout, page)
    pool = seal(kernels, "cuda_seal", layout, memory, jobs)
    np.testing.assert_array_equal(pool, sealed)


@pytest.mark.parametrize("ranks", [WIDE, LATENTS], ids=["wide", "latents"])
@pytest.mark.parametrize("tier", [Tier(8, 8), Tier(4, 4), Tier(3, 3)], ids=str)
def test_seal_writes_wide_rows_and_rows_that_hold_v(
    kernels: ctypes.CDLL, tier: Tier, ranks: list[tuple[int, int]]
) -> None:
    own = one_form(tier) if ranks is LATENTS else tier
    layout = sealing(own, 64, ranks=ranks)
    memory, jobs, sealed = pool_and_sealed(layout, 64)
    pool = seal(kernels, "cuda_seal", layout, memory, jobs)
    np.testing.assert_array_equal(pool, sealed)


@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_a_listed_seal_leaves_out_pages_that_are_none(
    kernels: ctypes.CDLL, tier: Tier
) -> None:
    layout = sealing(tier, 64)
    memory, jobs, sealed = pool_and_sealed(layout, 64)
    listed = [(-1, 0, 0), *jobs, (-1, -1, -1)]
    pool = seal(kernels, "cuda_seal_listed", layout, memory, listed)
    np.testing.assert_array_equal(pool, sealed)
