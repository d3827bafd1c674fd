"""Keys of heads that share one latent (MLA, DeepSeek-V2, arXiv 2405.04434), in absorbed
form: what maps latents to each head's keys and values is in the maps of queries and of
outputs.

Sizes: T packed tokens, R dims of the latent, r dims that turn, d = R + r of the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""cos and sin [T, r/2] of the dims that turn."""


@dataclass(frozen=True)
class LatentForm:
    """``rank``: R. ``width``: numbers of a value, R and zeros. ``norm_eps``: of the RMS
    norms of latents, those of queries among them."""

    rank: int
    width: int
    norm_eps: float


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


def keys_of_values(
    k: Tensor, v: Tensor, form: tuple[int, int], angles: Angles
) -> Tensor:
    """k and v [T, heads * d] of heads whose keys are their values times a weight and
    then turned, in ``form[1]`` of their ``form[0]`` dims -> [T, heads * (d + r)]: each
    value, and what RoPE makes of the r dims that turn."""
    return torch.cat(
        [v.unflatten(-1, (-1, form[0])), _turned(k, form, angles)], -1
    ).flatten(-2)


def turned_queries(
    q: Tensor, weight: Tensor, form: tuple[int, int], angles: Angles
) -> Tensor:
    """q [T, heads * d] as it meets ``keys_of_values``: times the keys' ``weight`` [d],
    and 0 in the dims that turn; those follow."""
    dims, turned = form
    half, gap = turned // 2, (dims - turned) // 2
    a, still_a, b, still_b = (q.unflatten(-1, (-1, dims)) * weight).split(
        [half, gap, half, gap], -1
    )
    none = torch.zeros_like(a), torch.zeros_like(b)
    return torch.cat(
        [none[0], still_a, none[1], still_b, _turned(q, form, angles)], -1
    ).flatten(-2)


def _turned(x: Tensor, form: tuple[int, int], angles: Angles) -> Tensor:
    """x [T, heads * d] -> [T, heads, r]: the dims of the first r / 2 planes, turned."""
    dims, turned = form
    half = turned // 2
    cos, sin = (part[:, None, :half] for part in angles)
    heads = x.unflatten(-1, (-1, dims))
    a, b = heads[..., :half], heads[..., dims // 2 : dims // 2 + half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
