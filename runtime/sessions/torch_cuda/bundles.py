"""How many rows of one sequence decode attention takes together (KVLATHE_BUNDLES of
abi.h)."""

from __future__ import annotations

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import BUNDLES, CudaLibrary
from kvlathe.runtime.native.room import check_layers

MOST_BUNDLED = 1
"""Rows of a bundle. MAX_BUNDLE once a GPU has shown that bundles are right there, and
once fewer than four rows stay alone: on an H200 two are slower together."""


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
