"""The limits of the CUDA kernels are those of their header, and plans beyond them are
refused at build."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlathe.base import kernel_limits
from kvlathe.base.errors import KvlatheError
from kvlathe.engines.targets import cuda, onnxruntime
from kvlathe.export.methods import fp8
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.lives import KEEP, SEAL, Compact, Divide, Life, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.native.cuda import LEAST_CHUNK
from kvlathe.runtime.sessions.torch_cuda.model.rows import WIDEST

LIMITS = kernel_limits.kernel_limits()


HOT = Tier(16, 16)


def plan_of(
    lanes: int = 1,
    group: int = 1,
    rank: int = 64,
    rank_v: int = 64,
    inputs: int = 64,
    groups: int = 1,
    life: Life = KEEP,
) -> CompressionPlan:
    """16-bit pages; each group beyond the first holds one lane."""
    shape = ModelShape(1, lanes * group, lanes, inputs, 64, 100, 512)
    every = tuple(
        Lane(0, head, inputs, rank, rank_v, projected=True) for head in range(lanes)
    )
    first = Group(tuple(range(lanes - groups + 1)), HOT, life=life)
    others = [Group((lanes - 1 - i,), HOT, life=life) for i in range(groups - 1)]
    return CompressionPlan(shape, every, (first, *others))


def divided_into(count: int) -> CompressionPlan:
    """One head whose tokens are divided among so many cold tiers."""
    life = Divide((1 / count,) * count)
    return dataclasses.replace(
        plan_of(),
        groups=(Group((0,), HOT, (Tier(8, 8),) * count, life),),
        score=ObservationWindow(last=8),
    )


def sealed_in(tier: Tier, page: int = 64) -> CompressionPlan:
    """Codes behind the 16-bit pages."""
    groups = (Group((0,), HOT, (tier,), SEAL),)
    return dataclasses.replace(
        plan_of(), groups=groups, page_tokens=page, prefill_chunk=page
    )


def coded(page: int = 64, group_k: int = 32, group_v: int = 32) -> CompressionPlan:
    return sealed_in(Tier(4, 4, group_k=group_k, group_v=group_v), page)


@pytest.mark.parametrize(
    ("name", "plan", "step"),
    [
        ("kMaxBuckets", lambda n: plan_of(lanes=n, groups=n), 1),
        ("kMaxSlots", lambda n: divided_into(n - 1), 1),
        ("kMaxLanes", lambda n: plan_of(lanes=n), 1),
        ("kMaxGroup", lambda n: plan_of(group=n), 1),
        ("kMaxRank", lambda n: plan_of(rank=n), 16),
        ("kMaxRankV", lambda n: plan_of(rank_v=n), 16),
        ("kMaxInput", lambda n: plan_of(inputs=n), 1),
        ("kMaxPage", lambda n: coded(page=n), LIMITS["kMaxPage"]),
        ("kLeastCodedPage", lambda n: coded(page=n), -LIMITS["kLeastCodedPage"] // 2),
        ("kRankMultiple", lambda n: coded(group_k=n), 8),
        ("kRankMultiple", lambda n: coded(group_v=n), -8),
    ],
)
def test_a_plan_at_a_limit_is_taken_and_one_beyond_it_is_refused(
    name: str, plan: Callable[[int], CompressionPlan], step: int
) -> None:
    cuda.check_plan("cuda", plan(LIMITS[name]))
    with pytest.raises(KvlatheError) as refusal:
        cuda.check_plan("cuda", plan(LIMITS[name] + step))
    assert str(LIMITS[name] + step) in str(refusal.value)
    assert refusal.value.remedy


def test_wide_ranks_are_for_the_cuda_backend_alone() -> None:
    wide, narrow = plan_of(rank=LIMITS["kNarrowRank"] + 16), plan_of(rank=128)
    cuda.check_plan("cuda", wide)
    assert not onnxruntime.gpus(wide, "float16")
    assert onnxruntime.gpus(narrow, "float16") == cuda.ARCHITECTURES


def test_pages_of_codes_are_powers_of_two() -> None:
    with pytest.raises(KvlatheError, match="pages have 96 tokens"):
        cuda.check_plan("cuda", coded(page=96))


FORMS = [
    Tier(4, 8),
    Tier(4, 4, "token", "rank"),
    Tier(3, 3),
    Tier(2, 2, "rank", "rank", coding_v="normal"),
    fp8.TIER,
]


@pytest.mark.parametrize("tier", FORMS, ids=str)
def test_every_form_is_taken(tier: Tier) -> None:
    plan = sealed_in(tier)
    cuda.check_plan("cuda", plan)
    assert onnxruntime.gpus(plan, "float16") == cuda.ARCHITECTURES


def test_every_window_of_a_bucket_counts() -> None:
    """Each is counted by a build's refusal."""
    most = LIMITS["kMaxBuckets"]

    def plan_with(windows: int) -> CompressionPlan:
        groups = [
            Group((i,), HOT, (Tier(8, 8),), Window(64, 64 * i)) for i in range(windows)
        ]
        return dataclasses.replace(plan_of(lanes=windows), groups=tuple(groups))

    cuda.check_plan("cuda", plan_with(most // 2))
    with pytest.raises(KvlatheError, match=f"has {most + 2} buckets"):
        cuda.check_plan("cuda", plan_with(most // 2 + 1))
    with_windows = plan_with(most // 2)
    groups = [dataclasses.replace(group, life=SEAL) for group in with_windows.groups]
    without = dataclasses.replace(with_windows, groups=tuple(groups))
    cuda.check_plan("cuda", without)
    for plan in (with_windows, without):
        assert onnxruntime.gpus(plan, "float16") == cuda.ARCHITECTURES


@pytest.mark.parametrize("apart", [True, False])
def test_prefixes_compacted_head_by_head_take_a_bucket_a_head(apart: bool) -> None:
    """The refusal says how all heads share one."""
    most = LIMITS["kMaxBuckets"]
    groups = most + 1 if apart else 1
    plan = plan_of(lanes=most + 1, groups=groups, life=Compact(0.3))
    if not apart:
        cuda.check_plan("cuda", plan)
        assert not onnxruntime.gpus(plan, "float16")
        return
    with pytest.raises(KvlatheError) as refusal:
        cuda.check_plan("cuda", plan)
    assert f"{most + 1} buckets, one for each window or head" in refusal.value.reason
    assert "heads=same" in refusal.value.remedy


def test_groups_that_no_kernel_reads_are_refused() -> None:
    for tier in (Tier(4, 4, group_v=48), Tier(4, 4, "token", "rank", 128, 64)):
        with pytest.raises(KvlatheError, match="divide a page"):
            cuda.check_plan("cuda", sealed_in(tier))


def test_the_runtime_knows_the_same_numbers() -> None:
    assert LIMITS["kLeastChunk"] == LEAST_CHUNK
    assert LIMITS["kMaxColumns"] == WIDEST


@pytest.mark.parametrize(
    ("of", "taken"),
    [
        ("buckets", "at most {kMaxBuckets}"),
        ("buckets of one head", "at most {kMaxSlots}"),
        ("KV heads of a layer", "at most {kMaxLanes}"),
        ("query heads a KV head", "at most {kMaxGroup}"),
        ("rank", "at most {kMaxRank}"),
        ("rank of V", "at most {kMaxRankV}"),
        ("dimensions of a head before its projection", "at most {kMaxInput}"),
        ("quantization groups", "multiples of {kRankMultiple}"),
        ("tokens of a quantized page", "{kLeastCodedPage}, 128 or {kMaxPage}"),
    ],
)
def test_the_page_says_the_same_numbers(of: str, taken: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "native.md").read_text("utf-8")
    assert f"| {of} | {taken.format(**LIMITS)}" in page


def test_a_missing_header_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_limits, "HEADER", tmp_path / "limits.h")
    with pytest.raises(KvlatheError, match="limits of the CUDA kernels are unknown"):
        kernel_limits.kernel_limits.__wrapped__()
