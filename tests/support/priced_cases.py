"""Losses as a model might have them, without a model."""

from __future__ import annotations

import numpy as np

from kvlathe.export.methods.assignment import Assignment, Priced
from kvlathe.export.methods.forms import FORMATS, Grid
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
    error = np.array([4.0**-x.bits + np.exp(-rank / 12) for rank, x in grid.options])
    format_of = [FORMATS.index(form) for _, form in grid.options]
    of_format = rng.uniform(0.5, 2, (2 * lanes, len(FORMATS)))[:, format_of]
    scale = 10 ** rng.uniform(-3, 0, (2 * lanes, 1))
    far = 10 ** rng.uniform(-4, 0, (lanes, 1))
    less = np.array([life.sees.is_less for life in grid.lives])
    missing = np.where(less, 1 - grid.pages / grid.pages.max(), 0.0)
    coded = error * of_format * scale
    whole = coded * rng.uniform(0.3, 1, coded.shape)  # the first tokens as they are
    return Priced(grid, np.stack([coded, whole]), far * missing**2)


def shuffle(choice: Assignment, seed: int = 0) -> Assignment:
    """The same forms for other lanes: equal bytes, no adaptation."""
    order = np.random.default_rng(seed).permutation(len(choice.k))
    return Assignment(choice.k[order], choice.v[order], choice.window[order])
