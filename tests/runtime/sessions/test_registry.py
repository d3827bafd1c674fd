"""Words that are said where a session is chosen."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.memory import OutOfMemory
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import FileRecord, Limits, Manifest
from kvlathe.plan.memory import memory_table
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.native import library
from kvlathe.runtime.sessions import registry
from kvlathe.runtime.sessions.gpu.side_memory import side_bytes
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.sessions.protocols import Session
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


def on_gpu(free: int, total: int) -> registry.Runner:
    return dataclasses.replace(
        registry.ON_TORCH, memory=lambda: (free, total), beside=beside
    )


def beside(plan: CompressionPlan, limits: Limits, total: int) -> int:
    """Bytes that a session keeps beside weights and cache."""
    return side_bytes(plan, limits, total)


def weighing(size: int, batch: int = 8) -> Manifest:
    """An engine of ``size`` bytes."""
    asked = manifest("float32")
    limits = dataclasses.replace(asked.limits, max_batch_size=batch)
    files = {"weights": FileRecord(size, "")}
    return dataclasses.replace(asked, limits=limits, files=files)


def default_bytes(plan: CompressionPlan, max_seq_len: int) -> int:
    """Bytes of a cache where memory is no limit."""
    asked = manifest("float32")
    limits = dataclasses.replace(asked.limits, max_seq_len=max_seq_len)
    runner = on_gpu(1 << 50, 1 << 50)
    asked = dataclasses.replace(asked, limits=limits)
    return registry.cache_bytes(asked, CacheLayout(plan), runner)


def beside_the_batch(plan: CompressionPlan, max_seq_len: int) -> int:
    """Bytes of the default cache that are not a full batch's."""
    batch = manifest("float32").limits.max_batch_size
    steady = batch * CacheLayout(plan).bytes_for(max_seq_len)
    return default_bytes(plan, max_seq_len) - steady


@pytest.mark.parametrize("kind", PLANS)
def test_the_default_cache_holds_the_longest_sequence(kind: str) -> None:
    pool = PagePool(CacheLayout(PLANS[kind]), default_bytes(PLANS[kind], 1024))
    assert pool.has_room_for(1024)


@given(
    free=st.integers(0, 1 << 40),
    used=st.integers(1, 1 << 40),
    weights=st.integers(0, 1 << 38),
    share=st.floats(0.01, 1),
)
def test_a_gpu_is_used_up_to_its_share(
    free: int, used: int, weights: int, share: float
) -> None:
    """An engine takes its share, whatever others hold, or what is free but for a rest;
    all of it, or it is refused for want of a few pages."""
    layout, total = CacheLayout(PLANS["mixed"]), free + used
    engine = weighing(weights, batch=1 << 24)
    beside = side_bytes(layout.plan, engine.limits, total)
    granted = min(share * total, free - min(1 - share, 0.1) * total)
    pages = 2 * len(layout.page_stride) * max(layout.page_stride)
    try:
        room = registry.cache_bytes(engine, layout, on_gpu(free, total), share)
    except OutOfMemory:
        assert beside + weights + pages >= granted - 1
    else:
        assert abs(beside + weights + room - granted) <= 1


def test_two_engines_with_half_of_a_gpu_each_are_told_nothing() -> None:
    layout, total = CacheLayout(PLANS["mixed"]), 80 << 30
    engine = weighing(16 << 30, batch=1 << 24)
    own = side_bytes(layout.plan, engine.limits, total) + engine.size
    first = registry.cache_bytes(engine, layout, on_gpu(total, total), 0.45)
    left = on_gpu(total - first - own, total)
    assert registry.cache_bytes(engine, layout, left, 0.45) == first
    with pytest.raises(OutOfMemory) as found:
        registry.cache_bytes(engine, layout, on_gpu(56 << 30, total), 0.15)
    need = int(str(found.value).split("--gpu-memory-utilization 0.")[1][:2]) / 100
    assert registry.cache_bytes(engine, layout, on_gpu(56 << 30, total), need)


@pytest.mark.parametrize("kind", ["mixed", "sealed compacted"])
def test_a_second_engine_on_a_gpu_is_told_what_is_free_and_what_it_needs(
    kind: str,
) -> None:
    """Before its weights are loaded."""
    layout, total = CacheLayout(PLANS[kind]), 80 << 30
    engine = weighing(16 << 30, batch=1 << 24)
    first = registry.cache_bytes(engine, layout, on_gpu(total, total))
    left = total - first - engine.size
    with pytest.raises(OutOfMemory) as found:
        registry.cache_bytes(engine, layout, on_gpu(left, total))
    said = str(found.value)
    one = memory_table(layout, engine.limits.max_seq_len, 1)[-1]["peak"]
    for number in (left, total, engine.size, one):
        assert f"{number:,}" in said
    assert "--gpu-memory-utilization" in said
    with pytest.raises(OutOfMemory, match=f"{8 << 30:,} bytes"):
        registry.cache_bytes(engine, layout, on_gpu(20 << 30, total), asked=8 << 30)
    own = side_bytes(layout.plan, engine.limits, total)
    assert own > 0
    exact = on_gpu((24 << 30) + own, total)
    assert registry.cache_bytes(engine, layout, exact, asked=8 << 30) == 8 << 30
    with pytest.raises(OutOfMemory, match=f"steps take {own:,}"):
        less = on_gpu((24 << 30) + own - 1, total)
        registry.cache_bytes(engine, layout, less, asked=8 << 30)


def test_weights_that_find_no_memory_are_one_sentence() -> None:
    """Another process may take what was free a moment ago. Nothing is kept of what was
    loaded until then."""
    loaded: list[weakref.ref[torch.Tensor]] = []

    def loads() -> Session:
        weights = torch.zeros(10)
        loaded.append(weakref.ref(weights))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(OutOfMemory) as found:
        registry.loaded(loads, "out/engine", 1600, 800)
    said = str(found.value)
    assert said.startswith("out/engine finds no memory for its 1,600 bytes of weights")
    assert "Tried to allocate 2.00 GiB" in said and "Free memory" in said
    assert not loaded[0]()


def test_prompts_that_are_ranked_in_slices_need_no_room_for_whole_ones() -> None:
    """Twice the prompt takes twice the room beside the batch where it is ranked whole,
    and no more than before where it is ranked in slices."""
    plan = PLANS["mixed"]
    assert plan.index.observation
    window = dataclasses.replace(plan.index.observation, slice_tokens=64)
    sliced = dataclasses.replace(plan, score=window)
    assert beside_the_batch(plan, 4096) > 1.5 * beside_the_batch(plan, 2048)
    assert beside_the_batch(sliced, 4096) < 1.1 * beside_the_batch(sliced, 2048)
