"""Pages to seal in every number format, and the bytes that kvlathe/plan/codec.py makes of
them: for the CUDA kernels, on a GPU and on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlathe.plan.codec import Bytes, matrices
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from tests.support.attend_cases import plan_of
from tests.support.format_cases import CODED_TIERS
from tests.support.mixed_cases import FLOATS

TIERS = [
    *CODED_TIERS,
    *FLOATS,
    Tier(3, 3, "rank", "token", 32, 64, rounding="stochastic"),
    Tier(3, 8, "token", "rank", 48, 48, span_k=0.7),
    Tier(4, 3, "rank", "rank", coding_k="normal", coding_v="normal"),
    Tier(8, 8),
    Tier(4, 4, "rank", "token", 32, 16),
    Tier(2, 2, "rank", "rank", 48, 32),
    Tier(8, 2, "token", "rank", 48, 64),
    Tier(4, 8, "token", "token", 64, 32),
    Tier(16, 4, "rank", "token", 64, 64),
    Tier(4, 2, "rank", "token", 64, 64, rounding="stochastic"),
    Tier(2, 2, "rank", "token", 128, 64, span_k=0.65, span_v=0.8),
    Tier(8, 4, "token", "rank", 32, 32, rounding="stochastic"),
]
RANKS = [(128, 48), (80, 16), (16, 112)]
Jobs = list[tuple[int, int, int]]
"""(Hot page, cold page, position of its first token) each."""


WIDE = [(256, 144), (16, 512), (576, 256)]
LATENTS = [(80, 64), (576, 512), (48, 48)]


def sealing(
    tier: Tier,
    page: int,
    cold: tuple[int, ...] = (0, 1, 3, 5),
    ranks: Sequence[tuple[int, int]] = RANKS,
) -> CacheLayout:
    """Two layers of three lanes; those of ``cold`` are sealed. In lanes of LATENTS V is
    the beginning of K."""
    once = ranks is LATENTS
    lanes = [
        Lane(
            layer, h, pair[0] if once else 128, *pair, "none", (), not once, None, once
        )
        for layer in range(2)
        for h, pair in enumerate(ranks)
    ]
    hot = Tier(16, 16)
    kept = tuple(lane for lane in range(6) if lane not in cold)
    groups = [Group(cold, hot, (tier,), SEAL)]
    if kept:
        groups.append(Group(kept, hot))
    head_dim = max(lane.input_dim for lane in lanes)
    return CacheLayout(plan_of(lanes, groups, head_dim, 2, page))


def pool_and_sealed(layout: CacheLayout, page: int) -> tuple[Bytes, Jobs, Bytes]:
    """A random pool, pages to seal, and what the pool is with them sealed by
    kvlathe/plan/codec.py."""
    rng = np.random.default_rng(3)
    size = 40 * max(layout.page_stride)
    host = rng.standard_normal(size // 2).astype(np.float16)
    half = layout.page_stride[0] // 4  # half a page of constant groups
    host[:half] = np.float16(0.3)
    host[half : 2 * half] = rng.integers(0, 31, half) / 2  # just between two codes
    memory = host.view(np.uint8)
    before = memory.copy()
    last = size // layout.page_stride[1]
    jobs = [(i, last - 1 - i, 7 + i * page) for i in range(3)]
    hot, cold = matrices(layout, 0), matrices(layout, 1)
    for source, target, position in jobs:
        pages = [
            memory[page * stride :][:stride]
            for page, stride in zip(
                (source, target), layout.page_stride[:2], strict=True
            )
        ]
        for lane, pair in cold.items():
            for part, fresh in zip(pair, hot[lane], strict=True):
                part.write(pages[1], fresh.read(pages[0]), position)
    return before, jobs, memory
