"""ZACK, sections 4.1 to 5.2: rotate and drop, with V rotated together with W_O,
calibrated on coherent text.

Without RoPE the rotation of Q and K is folded into W_Q and W_K: the lanes then say rope
"none" and nothing is projected at run time.
"""

from __future__ import annotations

from kvlathe.export.bases.rotation import (
    Rotation,
    balanced_rotation,
    rotation,
    score_gram,
    shared_basis,
)
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.method import Method
from kvlathe.export.methods.options import RankOptions


def rotate(stats: Stats, options: RankOptions) -> Rotation:
    """SVD of the stacked queries and keys; SVD of the values stacked on (W_O^h)^T of
    the lane's query heads."""
    if options.basis == "balanced":
        return balanced_rotation(stats)
    centre = options.centre and stats.shape.shifts
    moments = stats.whole
    values = moments.second("v", centre) * moments.tokens
    scores = shared_basis(score_gram(moments, centre))
    outputs = shared_basis(values, stats.wo_gram)
    return rotation(stats, scores, outputs, centre)


METHOD = Method(
    "rotate and drop dimensions, V together with W_O; calibrated on text",
    RankOptions(),
    rotate=rotate,
    calibration="text",
)
