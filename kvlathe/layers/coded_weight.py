"""A linear map whose weights are codes with scales, as the exporter writes it and
runtimes read it.

Sizes: K inputs, N outputs, g inputs of a group, G groups of an output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NIBBLES = 2
"""4-bit codes in a byte, the first in its low bits."""


@dataclass(frozen=True)
class CodedWeight:
    """``codes`` [N, G, g * bits / 8] uint8, or float8 [N, 1, K]; ``scales`` [N, G];
    ``zeros`` [N, G * bits / 8 rounded up] uint8, or None where all are the middle code.

    They lie as com.microsoft.MatMulNBits takes them.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int

    def matrix(self, inputs: int) -> Tensor:
        """The weights [N, K], float32; what fills up the last group is left out."""
        if self.codes.is_floating_point():
            return self.codes[:, 0].float() * self.scales.float()
        centred = unpack(self.codes, self.bits).float() - self.middles()
        return (centred * self.scales.float().unsqueeze(-1)).flatten(1)[:, :inputs]

    def middles(self) -> Tensor:
        """The code that stands for 0, of each group or of all: [N, G, 1] or one."""
        if self.zeros is None:
            return torch.tensor(float(middle(self.bits)), device=self.codes.device)
        own = unpack(self.zeros, self.bits)[:, : self.scales.shape[1]]
        return own.unsqueeze(-1).float()


def middle(bits: int) -> int:
    return 1 << (bits - 1)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] -> [..., n * bits / 8 rounded up]; bits 4 or 8."""
    if bits == 8:
        return numbers
    if numbers.shape[-1] % NIBBLES:
        numbers = torch.nn.functional.pad(numbers, (0, 1))
    return numbers[..., ::NIBBLES] | (numbers[..., 1::NIBBLES] << 4)


def unpack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., n * bits / 8] -> [..., n]."""
    if bits == 8:
        return codes
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
