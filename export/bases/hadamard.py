"""Hadamard matrices with random signs: rotations that spread every axis over all (QuaRot,
arXiv 2404.00456)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def hadamard(rank: int, rng: np.random.Generator) -> Array:
    """An orthogonal matrix [rank, rank] that spreads every axis over all of them: random
    where the rank is no power of two."""
    if rank & (rank - 1):
        q, r = np.linalg.qr(rng.normal(size=(rank, rank)))
        return q * np.sign(np.diag(r))
    doubling = [[1.0, 1.0], [1.0, -1.0]]
    matrix = np.ones((1, 1))
    while len(matrix) < rank:
        matrix = np.kron(doubling, matrix)
    return rng.choice([-1.0, 1.0], (rank, 1)) * matrix / np.sqrt(rank)
