"""K and V of a chunk, apart.

LMCache's chunks are [2, layers, tokens, hidden], or [layers, tokens, heads * 2 * d] where
an engine's blocks hold K and V of a head side by side, as vLLM's do from 0.29 on. A
chunk does not say how wide a head is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError

Words = npt.NDArray[np.uint16]
Shape = tuple[int, int, int, int]


def shape_apart(shape: Sequence[int], head_dim: int | None) -> Shape:
    """[sides, layers, tokens, hidden] of a chunk's ``shape``. ``head_dim``: d; None
    where nobody said it: K and V stay one side. Raises KvlatheError for chunks that have
    no whole heads."""
    if len(shape) == 4:
        sides, layers, tokens, hidden = map(int, shape)
        return sides, layers, tokens, hidden
    layers, tokens, width = map(int, shape)
    if head_dim is None:
        return 1, layers, tokens, width
    if width % (2 * head_dim):
        raise KvlatheError(
            f"a token has {width} numbers of K and V in a layer",
            f"head_dim is {head_dim}, and they are no whole heads",
            "give the serde the model's head_dim",
        )
    return 2, layers, tokens, width // 2


def apart(words: Words, head_dim: int | None) -> Words:
    """A chunk as ``shape_apart`` says.

    >>> apart(np.arange(8, dtype=np.uint16).reshape(1, 1, 8), 2)[:, 0, 0].tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    shape = shape_apart(words.shape, head_dim)
    if words.ndim == 3 and head_dim is not None:
        by_head = words.reshape(*words.shape[:2], -1, 2, head_dim)
        words = by_head.transpose(3, 0, 1, 2, 4)
    return np.ascontiguousarray(words.reshape(shape))


def joined(sides: Words, shape: Sequence[int], head_dim: int | None) -> Words:
    """The chunk of ``shape`` again: the inverse of `apart`."""
    if len(shape) == 3 and head_dim is not None:
        by_side = sides.reshape(2, *shape[:2], -1, head_dim)
        sides = by_side.transpose(1, 2, 3, 0, 4)
    return np.ascontiguousarray(sides.reshape(tuple(shape)))
