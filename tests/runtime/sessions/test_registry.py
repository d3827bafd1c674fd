"""What is said where a session is chosen."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.native import library
from kvlathe.runtime.sessions import registry
from kvlathe.runtime.sessions.host.onnx import OrtSession
from tests.native_cpu.test_session import manifest
from tests.support.fake_session import SHAPE
from tests.support.runtime_cases import plans, ranked_plans

PLANS = {**plans(SHAPE, page=32, chunk=64), **ranked_plans(SHAPE, page=16, chunk=32)}


@pytest.mark.parametrize(
    ("name", "value", "remedy", "other"),
    [
        ("KVLATHE_LIBRARY", "/nowhere/x.so", "kvlathe native", "Unset"),
        ("KVLATHE_NATIVE", "0", "Unset it", "kvlathe native"),
    ],
)
def test_missing_kernels_are_a_warning_of_one_line_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
    name: str,
    value: str,
    remedy: str,
    other: str,
) -> None:
    """The remedy is that of the cause: a build does not help who turned them off."""
    asked = manifest("float32")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(library, "find", library.find.__wrapped__)
    assert registry.runner(asked).session(asked) is OrtSession
    (line,) = logged
    assert line.count(remedy) == 1 and other not in line and "\n" not in line


def default_bytes(plan: CompressionPlan, max_seq_len: int) -> int:
    """Of a cache where memory is no limit."""
    asked = manifest("float32")
    limits = dataclasses.replace(asked.limits, max_seq_len=max_seq_len)
    runner = dataclasses.replace(registry.ON_CPU, room=lambda *_: 1 << 50)
    asked = dataclasses.replace(asked, limits=limits)
    return registry.cache_bytes(asked, CacheLayout(plan), runner)


def beside_the_batch(plan: CompressionPlan, max_seq_len: int) -> int:
    """Of the default cache, the bytes that are not a full batch's."""
    batch = manifest("float32").limits.max_batch_size
    steady = batch * CacheLayout(plan).bytes_for(max_seq_len)
    return default_bytes(plan, max_seq_len) - steady


@pytest.mark.parametrize("kind", PLANS)
def test_the_default_cache_holds_the_longest_sequence(kind: str) -> None:
    pool = PagePool(CacheLayout(PLANS[kind]), default_bytes(PLANS[kind], 1024))
    assert pool.has_room_for(1024)


@given(
    free=st.integers(0, 1 << 40),
    used=st.integers(0, 1 << 40),
    weights=st.integers(0, 1 << 38),
    share=st.floats(0.01, 1),
)
def test_a_gpu_is_used_up_to_its_share(
    free: int, used: int, weights: int, share: float
) -> None:
    """With weights and cache there, no more than the share is in use; all of it where
    there was room for the weights."""
    total = free + used
    room = registry._left(free, total, weights, share)
    taken = used + weights + room
    assert room == 0 or abs(taken - share * total) <= 1
    assert room > 0 or used + weights >= share * total - 1


def test_prompts_that_are_ranked_in_slices_need_no_room_for_whole_ones() -> None:
    """Twice the prompt takes twice the room beside the batch where it is ranked whole,
    and no more than before where it is ranked in slices."""
    plan = PLANS["mixed"]
    assert plan.observation
    window = dataclasses.replace(plan.observation, slice_tokens=64)
    sliced = dataclasses.replace(plan, observation=window)
    assert beside_the_batch(plan, 4096) > 1.5 * beside_the_batch(plan, 2048)
    assert beside_the_batch(sliced, 4096) < 1.1 * beside_the_batch(sliced, 2048)
