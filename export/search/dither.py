"""The noise that stochastic rounding adds to codes (the hash of docs/quantization.md), in
torch."""

from __future__ import annotations

import torch
from torch import Tensor

STEP, MASK = 0x9E3779B9, 0xFFFFFFFF


def _mixed(x: Tensor) -> Tensor:
    """MurmurHash3's finalizer on 32-bit numbers held in int64."""
    x = _times(x ^ (x >> 16), 0x85EBCA6B)
    x = _times(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """Modulo 2^32, without leaving int64."""
    lower = x * (factor & 0xFFFF)
    upper = x * (factor >> 16) & 0xFFFF
    return (lower + (upper << 16)) & MASK


def noise(key: tuple[int, ...], tokens: int, rank: int) -> Tensor:
    """[tokens, rank]: what is added to the codes of the channels of tokens 0.. before
    they are rounded down (the hash of docs/quantization.md).
    """
    numbers = [torch.tensor([[number & MASK]]) for number in key]
    numbers += [torch.arange(tokens)[:, None], torch.arange(rank)[None]]
    state = torch.zeros(1, 1, dtype=torch.int64)
    for number in numbers:
        state = _mixed(((state ^ number) + STEP) & MASK)
    return (state >> 8).double() * 2.0**-24
