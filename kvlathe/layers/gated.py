"""Attention whose output gates multiply before W_O, dim by dim (Qwen3-Next, AFMoE; arXiv
2505.06708) or head by head (LFM3). Values are cached in a basis, and gates are of the model's own dims: so
what attention gives is first turned back.

Sizes: T packed tokens, H KV heads of the model, G query heads a KV head, Rv the widest
rank of V in the layer, dv dims of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

HeadPlaces = tuple[tuple[int, int], ...]
"""The first column of each KV head in what attention gives, and its rank of V. Heads
that share one's cache have the same."""


@dataclass(frozen=True)
class HeadOutputs:
    """Maps of attention's output back into the model's dims: ``weight`` [H, Rv, dv],
    whose rows past a head's rank count nothing, and ``bias`` [H, 1, dv], the centre of
    its values."""

    places: HeadPlaces
    weight: Tensor
    bias: Tensor

    def __call__(self, o: Tensor) -> Tensor:
        """o [T, G * sum of ranks] -> [T, H * G * dv]"""
        widest = self.weight.shape[1]
        group = o.shape[1] // sum(rank for _, rank in {*self.places})
        heads: list[Tensor] = []
        for first, rank in self.places:
            own = o[:, first : first + group * rank].reshape(-1, rank)
            heads.append(F.pad(own, (0, widest - rank)))
        turned = torch.stack(heads) @ self.weight + self.bias  # [H, T * G, dv]
        return turned.unflatten(1, (-1, group)).transpose(0, 1).flatten(1)


def gated(o: Tensor, gates: Tensor, soft: bool = False) -> Tensor:
    """o [T, Hq * dv] times the sigmoids of ``gates`` [T, Hq * dv], or [T, Hq]; or times
    their softplus, float32, where gates are ``soft`` (Laguna)."""
    by_gate = o.unflatten(-1, (gates.shape[-1], -1))
    own = F.softplus(gates.float()).to(o.dtype) if soft else gates.sigmoid()
    return (by_gate * own.unsqueeze(-1)).flatten(1)
