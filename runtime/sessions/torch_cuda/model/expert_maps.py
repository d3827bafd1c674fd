"""The weights of experts as their kernels read them: outputs side by side, of halves or of
codes.

Sizes: E experts, K inputs, N outputs, g inputs of a group, G groups of an output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.coded_weight import CodedWeight, middle, unpack
from kvlathe.runtime.sessions.torch_cuda.model.coded import taken_code

MOST_APART = 64
"""Inputs between the two of a byte, at most: both are read in one step of a product."""


@dataclass(frozen=True)
class ExpertMap:
    """One map of all experts. ``weights``: halves or e4m3 [E, K, N], or bytes [E, W / 2, N]
    of 4 bits, where W is K with what fills it up and a byte has inputs that are ``apart``
    from each other. ``scales``: None of halves; [E, 1, N] float32 of e4m3; else [E, W / g,
    N]. ``zeros``: uint8 alike, or None where all are the middle code."""

    weights: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    apart: int = 0

    @property
    def bits(self) -> int:
        return 4 if self.apart else 8 * self.weights.element_size()

    @property
    def wide(self) -> int:
        """Inputs, with what fills them up."""
        return self.weights.shape[1] * (2 if self.apart else 1)

    @property
    def group(self) -> int:
        return self.wide if self.scales is None else self.wide // self.scales.shape[1]

    @property
    def outputs(self) -> int:
        return self.weights.shape[2]

    def step(self, inputs: int) -> int:
        """Inputs that a product takes at a time, where ``inputs`` are asked for."""
        return 2 * self.apart or inputs


def taken_map(tensors: dict[str, Tensor], role: str) -> ExpertMap | None:
    """The map ``role``, taken out of a layer's ``tensors``; None where it has none."""
    if role in tensors:
        return ExpertMap(tensors.pop(role))
    coded = taken_code(tensors, role)
    return None if coded is None else of_codes(coded)


def of_codes(coded: CodedWeight) -> ExpertMap:
    """A map whose ``codes`` [E, N, G, ...], ``scales`` and ``zeros`` are those of each
    expert."""
    if coded.bits == 8:
        codes = coded.codes[:, :, 0].mT.contiguous()
        return ExpertMap(codes, coded.scales.float().mT.contiguous())
    numbers = unpack(coded.codes, 4)  # [E, N, G, g]
    group = numbers.shape[-1]
    apart = min(group, MOST_APART)
    missing = -numbers.shape[2] * group % (2 * apart)
    flat = F.pad(numbers.flatten(2), (0, missing), value=middle(4))
    first, second = flat.unflatten(2, (-1, 2, apart)).unbind(3)
    weights = (first | second << 4).flatten(2).mT.contiguous()
    more = (0, missing // group)
    scales = F.pad(coded.scales, more).mT.contiguous()
    if coded.zeros is None:
        return ExpertMap(weights, scales, None, apart)
    own = unpack(coded.zeros, 4)[..., : coded.scales.shape[2]]
    zeros = F.pad(own, more).mT.contiguous()
    return ExpertMap(weights, scales, zeros, apart)
