"""The hash behind all noise of a plan, for numpy and torch alike (docs/quantization.md).

Noise has no state: it follows from the plan's seed and from what is drawn for, so the
same page comes from the same tokens, and every rank of a server draws the same.
"""

from __future__ import annotations

from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

STEP, WORD = 0x9E3779B9, 0xFFFFFFFF
DRAWN_BITS = 24
"""Bits of a hash that noise takes: as many as a float32 holds."""
UNIT = 2.0**-DRAWN_BITS


class Whole(Protocol):
    """An array of whole numbers, int64: of numpy, or of torch where a GPU has them."""

    def __add__(self, other: int, /) -> Self: ...
    def __and__(self, other: int, /) -> Self: ...
    def __mul__(self, other: int, /) -> Self: ...
    def __rshift__(self, other: int, /) -> Self: ...
    def __xor__(self, other: Self, /) -> Self: ...


Words = TypeVar("Words", bound=Whole)


def mixed(x: Words) -> Words:
    """MurmurHash3's finalizer of the last 32 bits: every bit of them moves every bit of
    the result. Products run over 64 bits, and the bits that matter stay."""
    x = x & WORD
    x = (x ^ (x >> 16)) * 0x85EBCA6B & WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & WORD
    return x ^ (x >> 16)


def hashed(key: Words, number: Words) -> Words:
    """The next key, after a number (taken modulo 2^32): mixed((key xor number) + STEP)."""
    return mixed((key ^ number) + STEP)


def drawn(key: Words, position: Words, channel: Words) -> Words:
    """The noise of a token's channel in units of UNIT: the first bits of its hash."""
    return hashed(hashed(key, position), channel) >> 32 - DRAWN_BITS


def noise_key(*numbers: int) -> int:
    """A hash of ``numbers``, one after the other, from the key 0."""
    key = np.zeros(1, np.int64)
    for number in numbers:
        key = hashed(key, np.array([number & WORD]))
    return int(key[0])


def noise(
    key: int, position: int | npt.NDArray[np.integer], tokens: int, rank: int
) -> npt.NDArray[np.float64]:
    """Multiples of 2^-24 in [0, 1), [tokens, rank]: of a token and channel c, the first
    24 bits of noise_key(numbers of ``key``, the token's position, c). ``position`` as
    in PageMatrix.write.
    """
    if isinstance(position, int):
        position = np.arange(position, position + tokens)
    of_tokens = position.astype(np.int64)[:, None]  # [tokens, 1]
    return drawn(np.array([key]), of_tokens, np.arange(rank)) * UNIT
