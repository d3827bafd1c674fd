"""Numbers of 4 bits, E2M1, two codes a byte, and scales that are powers of two, E8M0
(OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes; with the highest bit, their negatives."""
EXPONENT_BIAS = 127
NO_EXPONENT = 255
"""The code of E8M0 that stands for no number."""


def fp4_numbers(codes: Tensor) -> Tensor:
    """uint8 [..., n] -> float32 [..., 2 n]; the low bits hold the first of two codes.

    >>> fp4_numbers(torch.tensor([0x2F], dtype=torch.uint8))
    tensor([-6.,  1.])
    """
    levels = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)  # [16]
    return levels[torch.stack([codes & 15, codes >> 4], -1).int()].flatten(-2)


def powers_of_two(exponents: Tensor) -> Tensor:
    """uint8 -> float32 of the same shape, NaN for NO_EXPONENT.

    >>> powers_of_two(torch.tensor([126, 127, 130], dtype=torch.uint8))
    tensor([0.5000, 1.0000, 8.0000])
    """
    return torch.ldexp(
        torch.ones(exponents.shape), exponents.int() - EXPONENT_BIAS
    ).masked_fill(exponents == NO_EXPONENT, torch.nan)


def mxfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [..., n, 16], scales uint8 [..., n] -> float32 [..., 32 n]."""
    return (fp4_numbers(blocks) * powers_of_two(scales)[..., None]).flatten(-2)
