"""Values that pass a norm (Gemma 4): what a plan makes of them comes after it.

Sizes: T packed tokens, H KV heads, d dims of a head, R columns of the widest map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ValueMaps:
    """``maps`` [H, d, R] and ``bias`` [sum of ``widths``]. A lane narrower than R has its
    own columns first."""

    maps: Tensor
    bias: Tensor
    widths: Sequence[int]

    def __call__(self, normed: Tensor) -> Tensor:
        """normed [T, H, d] -> [T, sum of ``widths``]"""
        mapped = (normed.transpose(0, 1) @ self.maps).transpose(0, 1)  # [T, H, R]
        if len({*self.widths}) == 1:
            return mapped.flatten(-2) + self.bias
        own = [mapped[:, head, :width] for head, width in enumerate(self.widths)]
        return torch.cat(own, -1) + self.bias
