"""Losses as a model might have them, without a model."""

from __future__ import annotations

import numpy as np

from kvlathe.export.methods.assignment import Assignment, Priced
from kvlathe.export.methods.forms import FORMATS, Array, Grid
from kvlathe.export.search import measured
from kvlathe.plan.heads import ModelShape
from tests.support import stats_cases


def priced(
    seed: int,
    rope: bool = True,
    tokens: int = 2048,
    windowed: bool = True,
    shape: ModelShape = stats_cases.SHAPE,
) -> Priced:
    """Losses that fall as forms and windows grow, of lanes that differ a
    thousandfold."""
    stats = stats_cases.stats(seed, shape, rope)
    grid, rng = Grid(stats, 64, 0, tokens, 16, windowed), np.random.default_rng(seed)
    lanes = stats.shape.layers * stats.shape.kv_heads
    cuts = np.array([np.exp(-rank / 12) for rank in grid.ranks[:-1]])
    codes = np.array([4.0**-x.bits for x in FORMATS])
    codes = codes * rng.uniform(0.5, 2, (2 * lanes, len(FORMATS)))
    scale = 10 ** rng.uniform(-3, 0, (2 * lanes, 1))
    far = 10 ** rng.uniform(-4, 0, (lanes, 1))
    held = grid.pages.max(0)
    missing = np.where([life.drops for life in grid.lives], 1 - held / held.max(), 0.0)
    of_parts: list[Array] = []
    distant: list[Array] = []
    for part in [*grid.parts, *grid.distant_parts]:
        # Most of what codes lose is near, and in the first page.
        share = 1.0 if not part.skip else rng.uniform(0.3, 1, (2 * lanes, 1))
        share = share * (0.2 if part.near else 1.0)
        of_codes = codes * share
        of_cuts = np.broadcast_to(cuts, (2 * lanes, len(cuts)))
        of_parts.append(np.concatenate([of_cuts, of_codes], 1) * scale)
        distant.append((of_codes * scale)[:, measured.FEW_BITS])
    near = len(grid.parts)
    loss = measured.of_lives(grid, np.stack(of_parts[:near]), np.array(distant[near:]))
    return Priced(grid, loss, far * missing**2)


def shuffle(choice: Assignment, seed: int = 0) -> Assignment:
    """The same forms for other lanes: equal bytes, no adaptation."""
    order = np.random.default_rng(seed).permutation(len(choice.k))
    return Assignment(choice.k[order], choice.v[order], choice.window[order])
