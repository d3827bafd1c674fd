"""Keys of heads that share one latent (MLA, DeepSeek-V2, arXiv 2405.04434), in absorbed
form: what maps latents to each head's keys and values is in the maps of queries and of
outputs.

Sizes: T packed tokens, R dims of the latent, r dims that turn, d = R + r of the key.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""cos and sin [T, r/2] of the dims that turn."""


def latent_rows(
    k: Tensor, norm: Callable[[Tensor], Tensor], rank: int, width: int
) -> tuple[Tensor, Tensor]:
    """k [T, d] -> the key whose first ``rank`` dims are normalized, and the value: those
    dims, with zeros up to ``width``."""
    latent, turning = k.split([rank, k.shape[-1] - rank], -1)
    latent = norm(latent)
    return torch.cat([latent, turning], -1), F.pad(latent, (0, width - rank))


def turned_ends(x: Tensor, head_dim: int, angles: Angles) -> Tensor:
    """x [T, heads * d], where the last r dims of each head are turned by RoPE: pairs
    (i, i + r/2) of them."""
    cos, sin = (part.unsqueeze(-2) for part in angles)  # [T, 1, r/2]
    half = cos.shape[-1]
    heads = x.unflatten(-1, (-1, head_dim))  # [T, heads, d]
    still, a, b = heads.split([head_dim - 2 * half, half, half], -1)
    turned = [still, a * cos - b * sin, b * cos + a * sin]
    return torch.cat(turned, -1).flatten(-2)
