"""Keys in the balanced basis (rotation.py), whole and turned: before they are quantized by
channel.

Stored keys and their queries have equal variances in it, so a step of a channel errs by
what its queries make of it. Their mean is left out, which is exact: softmax ignores it.
Both pass their matrices in attention where the model has RoPE, and are folded into its
weights where it has none.
"""

from __future__ import annotations

import dataclasses

from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.forms import Grid
from kvlathe.plan.heads import Lane


def balanced_keys(
    lanes: tuple[Lane, ...], basis: Basis, stats: Stats, page_tokens: int, seed: int
) -> tuple[tuple[Lane, ...], Basis]:
    """``lanes``, which keep every dim, and ``basis`` with the keys of every lane that is
    not removed in that basis."""
    grid = Grid(stats, page_tokens, seed, page_tokens)
    turned = Basis(basis)
    kept: list[Lane] = []
    for lane in lanes:
        if not lane.removed:
            at = (lane.layer, lane.head)
            cut = grid.cut("k", lane.layer, lane.head, lane.rank_k)
            given = turned.get(at, LaneBasis())
            turned[at] = dataclasses.replace(
                given, a=cut.back, b=cut.into, centre_k=cut.centre
            )
            lane = _reading(lane)
        kept.append(lane)
    return tuple(kept), turned


def _reading(lane: Lane) -> Lane:
    """The lane that passes a basis: in attention, or folded into the weights."""
    if lane.rope == "none":
        return dataclasses.replace(lane, input_dim=lane.rank_k)
    return dataclasses.replace(lane, projected=True)
