"""The TensorRT plugin, driven through the plugin ABI by a host of our own
(trt_host.cc); on a GPU down to the answers.

Needs TensorRT's headers: TENSORRT_INCLUDE_DIR=.../include, or what trt_plugin.py names.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP, SEAL
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from tests.native.library import Library
from tests.native.step16 import Step16
from tests.native.trt_plugin import HALF, Call, Host, Job
from tests.support.attend_cases import Case, cases, plan_of

RARE = [HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
"""Most plans that are drawn are not in 16 bit."""


def two_lanes(
    tier: Tier | None = None,
    queries: tuple[int, ...] = (1, 5),
    sealed: tuple[int, ...] = (64, 64),
) -> Case:
    """``sealed``: tokens of each sequence in the bucket of ``tier``."""
    lanes = [
        Lane(0, 0, 64, 48, 80, projected=True),
        Lane(0, 1, 64, 32, 16, projected=True),
    ]
    cold = (tier,) if tier else ()
    groups = [Group((0, 1), Tier(16, 16), cold, SEAL if tier else KEEP)]
    lengths = [[70] + [cold] * (tier is not None) for cold in sealed]
    return Case(plan_of(lanes, groups, 64, 4, 64), 0, list(queries), lengths, seed=4)


@pytest.mark.parametrize("tier", [None, Tier(8, 8), Tier(4, 2)], ids=str)
def test_the_tensorrt_plugin_describes_its_outputs_and_workspace(
    host: Host, tier: Tier | None
) -> None:
    case = two_lanes(tier)
    call = Call(case, host)
    job = call.prepared()
    assert job.out[0].shape == (6, 4 * 96) and job.out[1].shape == (6, 176)
    place = call.names.index("pool_f16")
    assert (
        list(job.aliased) == [-1, -1, place]
        and job.out[2].shape == call.inputs[place].shape
    )
    assert [out.type for out in job.out] == [HALF] * 3
    assert job.workspace_bytes > 6 * 4 * 80 * 2


@settings(max_examples=60, suppress_health_check=RARE)
@given(case=cases(has_scoring=False))
def test_any_plan_in_16_bit_is_taken(host: Host, case: Case) -> None:
    """Every set of inputs that a plan can have: RoPE or none, projections or none, up
    to three buckets."""
    assume(Step16.takes(case.plan))
    job = Call(case, host).prepared()
    ranks = np.array([(lane.rank_k, lane.rank_v) for lane in case.lanes])
    assert (
        job.out[0].shape[1] == case.plan.model.group_size * ranks[:, 1].sum()
        and job.out[1].shape[1] == ranks.sum()
    )


def refused(call: Call, words: str, change: Callable[[Job], None]) -> None:
    job = call.job(change)
    assert call.host.drive(byref(job)) == 1
    assert words in job.said.decode()


def test_inputs_that_contradict_the_layout_are_refused_in_words(host: Host) -> None:
    call = Call(two_lanes(), host)
    old = call.table.copy()
    old[0] = 99

    def version(job: Job) -> None:
        job.layout = old.ctypes.data

    def cut(job: Job) -> None:
        job.layout_count = 20

    def narrow(job: Job) -> None:
        job.tensors[0].dims[1] = job.tensors[0].most[1] = 100

    def fewer(job: Job) -> None:
        job.inputs = 6

    refused(call, "the layer table has version 99", version)
    refused(call, "the layer table is too short", cut)
    refused(
        call,
        "q has the shape [6, 100], which contradicts the layout of layer 0",
        narrow,
    )
    refused(call, "fewer than its layout names", fewer)


def test_32_bit_pages_are_refused(host: Host) -> None:
    plan = plan_of(
        [Lane(0, 0, 32, 16, 16, projected=True)],
        [Group((0,), Tier(32, 32))],
        32,
        2,
        16,
    )
    table = layer_table(CacheLayout(plan), 0)

    def wide(job: Job) -> None:
        job.layout, job.layout_count = table.ctypes.data, len(table)

    refused(Call(two_lanes(), host), "this plan has 32-bit pages", wide)


def test_enqueue_says_what_is_missing_and_does_not_throw(host: Host) -> None:
    """Without a GPU the launch is refused with the driver's or the library's words."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    call = Call(two_lanes(), host)

    def memory(job: Job) -> None:
        job.workspace = call.bytes.data_ptr()

    refused(call, "enqueue failed", memory)


@settings(max_examples=25, suppress_health_check=RARE)
@given(case=cases(has_scoring=False))
def test_answers_and_pages_on_the_gpu(host: Host, case: Case) -> None:
    """o, rows and the pool, after build, serialization, deserialization and a dirty
    workspace."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    assume(
        Step16.takes(case.plan)
        and not any(tier.is_coded for tier in case.plan.index.tiers)
    )
    call = Call(case, host, "cuda")
    out, rows, memory = call.run()
    call.step.check_out(out)
    call.step.check_rows(rows)
    call.step.check_memory(memory)


@pytest.mark.parametrize(
    ("queries", "sealed"), [((1, 5), (64, 64)), ((40, 1, 17, 200), (0, 64, 64, 0))]
)
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_the_plugin_and_the_cuda_backend_give_the_same(
    host: Host,
    library: Library,
    bits: Literal[16, 8, 4, 2],
    queries: tuple[int, ...],
    sealed: tuple[int, ...],
) -> None:
    """A sealed page and a 16-bit tail under one softmax, decode rows and prompt chunks
    in one step: bit for bit."""
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    call = Call(
        two_lanes(Tier(bits, bits, "rank", "token", 64, 64), queries, sealed),
        host,
        "cuda",
    )
    out, rows, memory = call.run()
    call.step.check_rows(rows)
    call.step.check_out(out)
    backend = call.step.run(CudaLibrary(Native.load(library.path)), "cuda")
    np.testing.assert_array_equal(memory, backend[1])
    np.testing.assert_array_equal(out, backend[0])
