"""FDC, sections 5.1 and 5.2: rotate Q with K, and V with W_V, by SVD; drop the
dimensions of least singular value.

Differences from the paper: one rotation for each KV head (a GQA cache holds one K for
its query heads), ranks in multiples of 16, and the options of RankOptions.
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
    """SVD of the stacked queries and keys after RoPE; SVD of the head's W_V."""
    if options.basis == "balanced":
        return balanced_rotation(stats)
    centre = options.centre and stats.shape.shifts
    scores = shared_basis(score_gram(stats.whole, centre))
    return rotation(stats, scores, shared_basis(stats.wv_gram), centre)


METHOD = Method(
    "rotate and drop dimensions; calibrated on random tokens, if the basis is svd",
    RankOptions(),
    rotate=rotate,
    calibration="random",
)
