"""Made-up statistics: any shape, any conditioning, without a model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvlathe.export.calibration.effective_ranks import Entropies
from kvlathe.export.calibration.stats import Moments, Stats
from kvlathe.plan.heads import ModelShape

Array = npt.NDArray[np.float64]

SHAPE = ModelShape(3, 8, 4, 64, 96, 50, 256)


def samples(
    rng: np.random.Generator, lanes: tuple[int, int], tokens: int, d: int
) -> Array:
    """[L, H, tokens, d] with falling variances in a random basis and a mean that is not
    zero."""
    spread = np.exp(-np.arange(d) / (1 + rng.uniform(3, 20, (*lanes, 1, 1))))
    turned = (
        rng.normal(size=(*lanes, tokens, d))
        * spread
        @ np.linalg.qr(rng.normal(size=(d, d)))[0]
    )
    return turned * rng.uniform(0.3, 3.0, (*lanes, 1, 1)) + rng.normal(
        size=(*lanes, 1, d)
    )


def moments(shape: ModelShape, rng: np.random.Generator, tokens: int = 200) -> Moments:
    lanes, found = (shape.layers, shape.kv_heads), {}
    for name in "qkvo":
        x = samples(
            rng,
            lanes,
            tokens * (shape.group_size if name in "qo" else 1),
            shape.head_dim,
        )
        found |= {2 * name: x.mT @ x, name: x.sum(-2)} | (
            {f"{name}_max": np.abs(x).max(-2)} if name in "kv" else {}
        )
    return Moments(
        tokens,
        spread=rng.uniform(1, 50, lanes),
        hidden=rng.uniform(5, 9, shape.layers),
        **found,
    )


def entropies(shape: ModelShape, rng: np.random.Generator, texts: int = 5) -> Entropies:
    """Any numbers that effective ranks and cosines can be."""
    sizes = Entropies.shapes(shape, texts)
    found = {name: 1 + 15 * rng.random(size) for name, size in sizes.items()}
    side = rng.random((texts, shape.layers, shape.kv_heads, 12))
    side /= np.linalg.norm(side, axis=-1, keepdims=True)
    return Entropies(**found | {"likeness": side @ side.mT})


def stats(seed: int, shape: ModelShape = SHAPE, rope: bool = True) -> Stats:
    rng = np.random.default_rng(seed)
    wv, wo = (
        samples(rng, (shape.layers, shape.kv_heads), shape.hidden_size, shape.head_dim)
        for _ in range(2)
    )
    return Stats(
        shape=shape,
        rope=rope,
        scale=np.full(shape.layers, shape.head_dim**-0.5),
        wv_gram=wv.mT @ wv,
        wo_gram=wo.mT @ wo,
        halves=(moments(shape, rng), moments(shape, rng)),
        entropies=entropies(shape, rng),
        model_digest="made up",
        source={"source": "made up", "tokens": 400},
    )
