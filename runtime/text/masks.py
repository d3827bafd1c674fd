"""Masks: which tokens may come next, one bit a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError

Bits = npt.NDArray[np.int32]
WORD = 32
"""Tokens in a word of a mask."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Bit t % 32 of word t // 32 of ``bits[i]`` ([m, vocab / 32] int32) is 1 where
    token t may follow in row ``rows[i]`` of the logits. Rows that are not named may be
    followed by any."""

    rows: npt.NDArray[np.int64]
    bits: Bits


class StructureError(KvlatheError):
    """A structure that this engine cannot follow, or not any further."""


class Guide(Protocol):
    """The place of one answer in what it must look like. ``failure``: why it cannot go
    on, or None. ``vocabulary``: tokens of a mask."""

    vocabulary: int

    @property
    def failure(self) -> StructureError | None: ...

    @property
    def stopped(self) -> bool:
        """Whether the answer is whole: nothing may follow."""
        ...

    @property
    def asks(self) -> bool:
        """Whether it has a mask for the next token."""
        ...

    def fill(self, bits: Bits) -> None:
        """Write the next token's mask [1, words]."""
        ...

    def allows(self, token: int) -> bool:
        """Whether its mask allows a token."""
        ...

    def accept(self, token: int) -> None:
        """Go on by a token that its mask allows, or one that ends the text."""
        ...

    def copy(self) -> Guide:
        """A guide at the same place, which goes its own way."""
        ...


def allowed(guide: Guide, tokens: Sequence[int]) -> int:
    """Count the ``tokens`` that may follow, one after the other."""
    ahead = guide.copy()
    for count, token in enumerate(tokens):
        if ahead.stopped or (ahead.asks and not ahead.allows(token)):
            return count
        ahead.accept(token)
    return len(tokens)


def after(guide: Guide, tokens: Sequence[int]) -> Guide:
    """The guide behind ``tokens``, which may follow."""
    ahead = guide.copy()
    for token in tokens:
        ahead.accept(token)
    return ahead


def no_bits(rows: int, vocabulary: int) -> Bits:
    """Masks that allow nothing, to be filled."""
    return np.zeros((rows, -(-vocabulary // WORD)), np.int32)


def apply_masks(
    logits: npt.NDArray[np.float32], masks: Masks
) -> npt.NDArray[np.float32]:
    """The logits [R, vocab] with -inf for tokens that may not follow."""
    result = logits.copy()
    allowed = np.unpackbits(
        masks.bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little"
    )
    for row, own in zip(masks.rows.tolist(), allowed, strict=True):
        np.copyto(result[row], -np.inf, where=own == 0)
    return result
