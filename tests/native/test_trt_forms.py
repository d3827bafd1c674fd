"""Windows, codes of every form, and heads of one layer in many buckets, alone and
together, through the node that ONNX Runtime and TensorRT run: the plugin, driven by a
host of our own (trt_plugin.py). Answers and pages are those of the cuda backend, bit for
bit, and near float64 attention masked token by token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvlathe.base.kernel_limits import kernel_limits
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import SEAL, Life, Window
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from tests.native import test_forms_cuda as forms
from tests.native import test_windows_cuda as windows
from tests.native.library import Library
from tests.native.step16 import Step16, step_of
from tests.native.trt_plugin import Call, Host
from tests.support import mixed_cases as mixed
from tests.support.attend_cases import Case, plan_of

ROWS = [0, 1, 1, 3, 15, 16, 40, 130, 300]
"""New rows of a sequence: none, decodes, short chunks, and prompts in tiles."""
MANY_STEPS = mixed.mixed_steps([64, 128], 16, ROWS, has_scoring=False)


def some(examples: int) -> settings:
    rare = [HealthCheck.function_scoped_fixture]
    return settings(deadline=None, max_examples=examples, suppress_health_check=rare)


@pytest.fixture(scope="module")
def cuda(library: Library) -> Iterator[CudaLibrary]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    yield CudaLibrary(Native.load(library.path))


def check(host: Host, cuda: CudaLibrary, case: Case, near: float = 2e-3) -> None:
    """``near``: the mean error against float64, of the largest element."""
    call = Call(case, host, "cuda")
    out, rows, memory = call.run()
    call.step.check_rows(rows)
    call.step.check_memory(memory)
    backend, pages = Step16(case).run(cuda, "cuda")
    np.testing.assert_array_equal(memory, pages)
    np.testing.assert_array_equal(out, backend)
    expected = case.expected()[0]
    largest = np.abs(expected).max()
    assert out.size and np.isfinite(out).all()
    assert np.abs(out - expected).mean() <= near * largest
    assert np.abs(out - expected).max() <= 15 * near * largest


PRODUCTS = 2e-2
"""Products of codes round queries and shares to 8 bits."""


@some(30)
@given(case=MANY_STEPS)
def test_any_such_plan_is_taken_up_to_enqueue(host: Host, case: Case) -> None:
    """Shapes, types and the size of the workspace; needs no GPU."""
    job = Call(case, host).prepared()
    ranks = np.array([(lane.rank_k, lane.rank_v) for lane in case.lanes])
    group = case.plan.model.group_size
    assert job.out[0].shape[1] == group * ranks[:, 1].sum()
    assert job.out[1].shape[1] == ranks.sum()


@some(25)
@given(case=windows.windowed_steps())
def test_the_tensorrt_plugin_attends_windows_as_the_cuda_backend(
    host: Host, cuda: CudaLibrary, case: Case
) -> None:
    check(host, cuda, case, PRODUCTS)


@some(25)
@given(case=forms.sealed_steps())
def test_the_tensorrt_plugin_attends_every_form_of_codes_as_the_cuda_backend(
    host: Host, cuda: CudaLibrary, case: Case
) -> None:
    check(host, cuda, case)


@some(20)
@given(case=MANY_STEPS)
def test_the_tensorrt_plugin_attends_many_buckets_as_the_cuda_backend(
    host: Host, cuda: CudaLibrary, case: Case
) -> None:
    """Formats and windows mixed, some of them to the token, behind one fresh bucket."""
    check(host, cuda, case)


@pytest.mark.parametrize("tier", forms.TIERS, ids=str)
def test_long_contexts_of_a_form(host: Host, cuda: CudaLibrary, tier: Tier) -> None:
    """Blocks share a sequence; chunks take many stages; a decode step beside them."""
    plan = forms.sealed_plan((tier,), 64, 4)
    lengths = [[70, 1280], [1, 0], [64, 5120], [0, 64]]
    check(host, cuda, step_of(plan, [500, 1, 1, 17], lengths, 5))
    check(host, cuda, step_of(plan, [1, 1, 1, 1], lengths, 6))


@pytest.mark.parametrize("tier", [None, *windows.CODES], ids=str)
@pytest.mark.parametrize("window", [Window(64, 128), Window.of_tokens(100, 64)])
def test_long_prompts_in_a_window(
    host: Host, cuda: CudaLibrary, tier: Tier | None, window: Window
) -> None:
    ranks = enumerate(windows.RANKS)
    lanes = [Lane(0, h, 64, *pair, projected=True) for h, pair in ranks]
    every = tuple(range(len(lanes)))
    cold = () if tier is None else (tier,)
    lengths = [[700], [0], [64], [5]]
    if cold:
        lengths = [[n, 640 * i] for i, (n,) in enumerate(lengths)]
    plan = plan_of(lanes, [Group(every, Tier(16, 16), cold, window)], 64, 4, 64)
    check(host, cuda, step_of(plan, [900, 1500, 1, 33], lengths, 2), PRODUCTS)


def test_as_many_parts_as_there_can_be(host: Host, cuda: CudaLibrary) -> None:
    """Every head with a format and a window of its own, of one hot bucket."""
    lives: list[Life] = [SEAL, Window(64, 128), Window(0, 64)]
    lives.append(Window.of_tokens(100, 64))
    kinds = [(tier, life) for tier in mixed.TIERS[:7] for life in lives]
    plan = mixed.mixed_plan(kinds, range(len(kinds)), 64, 4)
    assert len(plan.index.parts) == kernel_limits()["kMaxBuckets"]
    kept = {life: (2 + i) * 64 for i, life in enumerate(lives[1:])}
    lengths = [
        mixed.lengths_of(plan, tail, 64 * pages, kept)
        for tail, pages in ((70, 40), (1, 90), (0, 3), (64, 20))
    ]
    check(host, cuda, step_of(plan, [400, 1, 1, 17], lengths, 5))
    check(host, cuda, step_of(plan, [1, 1, 1, 1], lengths, 6))


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("rows", [(1, 1, 1), (128, 1, 20)], ids=["decodes", "chunks"])
def test_layers_of_a_plan_as_auto_makes_it(
    host: Host, cuda: CudaLibrary, layer: int, rows: tuple[int, ...]
) -> None:
    """Buckets without heads of the layer are among its inputs; ranks are whole."""
    plan = mixed.model_plan(128)
    kept: dict[Life, int] = {mixed.NEAR: 128, mixed.NEWEST: 128}
    lengths = [
        mixed.lengths_of(plan, tail, whole, kept)
        for tail, whole in ((5, 640), (63, 128), (0, 2048))
    ]
    case = Case(plan, layer, list(rows), lengths, layer)
    case.scale = 0.05  # as step_of has it
    check(host, cuda, case, PRODUCTS)
