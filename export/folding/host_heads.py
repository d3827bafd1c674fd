"""Matrices that a host multiplies its heads with, where the checkpoint stays as it is.

A host such as vLLM hands over q, k and v of every head after RoPE, in the checkpoint's
order of dimensions, and takes back o of every head. So each lane has

    q' = q A,  k' = k B - c,  v' = (v - s) V,  o = o' O + s

with all that fold (fold.py) would have put into the weights. Files are .npz with arrays
``layer.head.name``; a matrix that is the identity is left out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.lane_fold import LaneFold, lane_folds
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.plan.plan import CompressionPlan


def write_heads(
    spec: DecoderSpec, plan: CompressionPlan, basis: Basis, path: Path
) -> None:
    """Raises KvlatheError unless plan, basis and model belong together."""
    arrays: dict[str, Tensor] = {}
    for layer, folds in lane_folds(spec, plan, basis).items():
        for fold in folds:
            for name, matrix in _matrices(fold, spec.order(layer)).items():
                arrays[f"{layer}.{fold.head}.{name}"] = matrix
    with path.open("wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            **{name: x.float().numpy() for name, x in arrays.items()},
        )


def _matrices(fold: LaneFold, order: list[int]) -> dict[str, Tensor]:
    """``q``, ``k`` [d, rank_k] and ``centre`` [rank_k]; ``v`` [d, rank_v], ``o``
    [rank_v, d] and ``shift`` [d]. float64."""
    keys = fold.k @ fold.proj_k
    q = _in_order(fold.q @ fold.proj_q, order)
    k = _in_order(keys, order)
    centre = fold.centre + fold.shift_k @ keys
    found: dict[str, Tensor] = {}
    if not _plain(q, k, centre):
        found["q"] = q
        found["k"] = k
        found["centre"] = centre
    if not _plain(fold.v, fold.out, fold.shift_v):
        found["v"] = fold.v
        found["o"] = fold.out
        found["shift"] = fold.shift_v
    return found


def _plain(one: Tensor, other: Tensor, shift: Tensor) -> bool:
    """Whether they change nothing."""
    if bool(shift.any()):
        return False
    return _is_identity(one) and _is_identity(other)


def _in_order(canonical: Tensor, order: list[int]) -> Tensor:
    """Rows of canonical dimensions to where the checkpoint has them (Rope.order)."""
    rows = torch.empty_like(canonical)
    rows[order] = canonical
    return rows


def _is_identity(matrix: Tensor) -> bool:
    rows, columns = matrix.shape
    if rows != columns:
        return False
    return torch.equal(matrix, torch.eye(rows, dtype=matrix.dtype))
