"""Plans and statistics that the tests of methods share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.methods.registry import methods
from kvlathe.plan.plan import CompressionPlan

LATHE = Path(__file__).resolve().parents[2] / "models" / "lathe-5m"
LOW_RANK = tuple(
    name for name, method in methods().items() if method.rotate and not method.measured
)
FORM = CacheSettings(32)
seeds = st.integers(0, 2**32 - 1)


def psd(rng: np.random.Generator, d: int, rank: int, sharp: float) -> np.ndarray:
    x = rng.normal(size=(rank, d)) * np.exp(-sharp * np.arange(d) / d)
    return x.T @ x / max(rank, 1)


def plan_of(request: str, stats: Stats, **asked: Any) -> CompressionPlan:  # noqa: ANN401  (RankOptions' fields)
    return compose(
        parse(request), stats.shape, stats.rope, stats, RankOptions(**asked), FORM
    )[0]
