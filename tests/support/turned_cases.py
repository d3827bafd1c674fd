"""lathe-5m with Q and K projected, in 16 bit."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np

from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.folding.fold import fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.formats import Tier
from kvlathe.plan.plan import CompressionPlan
from tests.support.made_once import made_once
from tests.support.runtime_cases import MODEL, model_shape, plans
from tests.support.tiers import with_tiers


def turned() -> tuple[CompressionPlan, Basis]:
    """Q and K projected, at full rank, by a random orthogonal matrix; 16-bit hot pages,
    sealed into 8 bit."""
    plan, d = plans(model_shape())["sealed"], model_shape().head_dim
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(d, d)))[0]
    lanes = tuple(dataclasses.replace(lane, projected=True) for lane in plan.lanes)
    basis = Basis(
        {
            (lane.layer, lane.head): LaneBasis(a=turn, b=turn, centre_k=turn[0])
            for lane in lanes
        }
    )
    projected = dataclasses.replace(plan, lanes=lanes)
    return with_tiers(projected, (Tier(16, 16),)), basis


@cache
def half_engine() -> tuple[Path, CompressionPlan]:
    """Exported in float16, once a test run. Read only."""
    plan, basis = turned()

    def exported(folder: Path) -> None:
        from kvlathe.export.onnx.model import export_onnx

        checkpoint = Checkpoint(MODEL)
        weights = fold(checkpoint, plan, basis)
        export_onnx(checkpoint.spec, plan, weights, folder, "float16")

    return made_once("half engine", exported), plan
