"""How many rows of one sequence decode attention takes together (KVLATHE_BUNDLES of
abi.h)."""

from __future__ import annotations

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import BUNDLES, MAX_BUNDLE, CudaLibrary
from kvlathe.runtime.native.room import check_layers

MOST_BUNDLED = MAX_BUNDLE
"""Rows of a bundle at most. 1: none."""
ROWS_THAT_PAY = 3
"""Rows of a sequence, on the mean of those without a prompt chunk, from which bundles are
faster. The kernel of bundles takes single rows, too, but more slowly than theirs
(docs/native.md)."""


def bundled_rows(most: int, rows_each: float) -> int:
    """Rows of a bundle, at most ``most``, in a step whose sequences bring ``rows_each``
    (`StepKind`)."""
    return most if rows_each >= ROWS_THAT_PAY else 1


def most_bundled(library: CudaLibrary, plan: CompressionPlan) -> int:
    """Rows of a sequence that are attended together: 1 in models of more query heads than
    the kernels have room for, and where the GPU has too little shared memory."""
    if MOST_BUNDLED == 1:
        return 1
    try:
        check_layers(library, plan, BUNDLES)
    except KvlatheError:
        return 1
    return MOST_BUNDLED
