"""The recurrence of layers with a state (kvlathe/layers/recurrence.py), and its node while
exporting."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlathe.layers import recurrence

NODES = {True: "DeltaRule", False: "StateSpace"}
"""Whether strengths are given -> the operator."""


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    strengths: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """As ``Recur``."""
    if torch.compiler.is_exporting():
        return _node(q, k, v, decays, strengths, states)
    return recurrence.recur(q, k, v, decays, strengths, states)


def _node(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    strengths: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """One node of the exported graph."""
    given = [] if strengths is None else [strengths]
    y, after = torch.onnx.ops.symbolic_multi_out(
        f"kvlathe::{NODES[strengths is not None]}",
        [q, k, v, decays, *given, states],
        dtypes=[torch.float32, torch.float32],
        shapes=[v.shape, states.shape],
        version=1,
    )
    return y, after
