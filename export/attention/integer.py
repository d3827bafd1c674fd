"""Attention on codes (HACK, Eq. 4): QK^T and PV as integer products plus corrections;
nothing is dequantized.

For one partition of n elements, with a ~ s_a a' + m_a and b ~ s_b b' + m_b,

    sum a b ~ s_a (s_b sum a' b' + m_b sum a') + m_a (s_b sum b' + n m_b)

where only sum a' b' is a matrix product, of 8-bit integers into 32 bit; partitions add
up. The paper's form stores sum b' with the cache. Ours makes a symmetric, m_a = 0, and
the second half vanishes: Q is symmetric in one scale a partition, and P, which is in
[0, 1], in one scale for each query and partition: one far larger share elsewhere, an
attention sink, then does not round the others to zero. Which form a tier takes is
``Tier.sums``.

Values in groups along the rank have no scale in common for the tokens that PV sums
over: each token's scale then goes into its share, sum P (s v' + m) = sum (P s) v' + sum
P m, and P s is what is rounded.

These are the eager forms; export/onnx/integer.py writes the same into the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEVELS_Q, LEVELS = 127, 255
"""The top codes of Q, with a sign, and of everything else, in 8 bits without one."""

LEAST_SCALE = 1e-30
"""Scales below this are those of rows of zeros, or as good as that."""


@dataclass(frozen=True)
class Coded:
    """Cached K or V: ``codes`` [H, N, R]; ``scale``, ``minimum`` and, where they are
    stored, ``sums`` of each group's codes: [H, N, g] of groups along the rank, [H, N /
    n, R] of groups of n tokens.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    sums: Tensor | None = None


@dataclass(frozen=True)
class Rounded:
    """One side of a product in 8 bits, a partition in its last axis: x ~ step * whole +
    low. ``low`` is None where it is 0; otherwise ``count`` elements are in each
    partition. Both and ``step`` are [..., 1].
    """

    whole: Tensor
    step: Tensor
    low: Tensor | None = None
    count: Tensor | None = None

    @classmethod
    def symmetric(cls, x: Tensor, levels: int) -> Rounded:
        step = (x.abs().amax(-1, keepdim=True) / levels).clamp(min=LEAST_SCALE)
        return cls((x / step).round(), step)

    @classmethod
    def asymmetric(cls, x: Tensor, member: Tensor) -> Rounded:
        """The codes of the elements where ``member``; the others get code 0 and count
        as nothing."""
        count = member.sum(-1, keepdim=True)
        low = (
            torch.where(member, x, torch.inf)
            .amin(-1, keepdim=True)
            .where(count > 0, 0.0)
        )
        high = torch.where(member, x, -torch.inf).amax(-1, keepdim=True)
        step = ((high - low) / LEVELS).clamp(min=LEAST_SCALE)
        return cls(
            torch.where(member, ((x - low) / step).round(), 0.0), step, low, count
        )

    @property
    def total(self) -> Tensor:
        """The sum of each partition."""
        own = self.step * self.whole.sum(-1, keepdim=True)
        return (
            own
            if self.low is None or self.count is None
            else own + self.count * self.low
        )

    def times(
        self, products: Tensor, scale: Tensor, minimum: Tensor, sums: Tensor | None
    ) -> Tensor:
        """Eq. 4 of every partition, from products of codes and the other side's
        metadata."""
        product = self.step * (
            products * scale + self.whole.sum(-1, keepdim=True) * minimum
        )
        if self.low is None or self.count is None or sums is None:
            return product
        return product + self.low * (sums * scale + self.count * minimum)


def scores(q: Tensor, k: Coded, groups: Tensor) -> Tensor:
    """q [H, G, Q, Rk] times keys, [H, G, Q, N]; ``groups`` [H, g, Rk] is 1 where a
    channel belongs to a group."""
    member = groups[:, :, None, None].bool()
    split = torch.where(member, q.unsqueeze(1), 0.0)  # [H, g, G, Q, Rk]
    if k.sums is None:
        rounded = Rounded.symmetric(split, LEVELS_Q)
    else:
        rounded = Rounded.asymmetric(split, member.expand_as(split))
    products = (rounded.whole.int().flatten(1, 3) @ k.codes.int().mT).unflatten(
        1, split.shape[1:4]
    )
    scale, minimum, sums = (
        None if x is None else x.mT[:, :, None, None]
        for x in (k.scale, k.minimum, k.sums)
    )
    assert scale is not None and minimum is not None  # [H, g, 1, 1, N]
    return rounded.times(products, scale, minimum, sums).sum(1)


def outputs(shares: Tensor, v: Coded) -> Tensor:
    """The mean of values under shares [H, G, Q, N] that sum to 1, [H, G, Q, Rv]."""
    partitions = (v.scale.shape[1], shares.shape[-1] // v.scale.shape[1])
    split = shares.unflatten(-1, partitions).permute(0, 3, 1, 2, 4)  # [H, N/n, G, Q, n]
    if v.sums is None:
        rounded = Rounded.symmetric(split, LEVELS)
    else:
        rounded = Rounded.asymmetric(split, torch.ones_like(split, dtype=torch.bool))
    products = (
        rounded.whole.int().flatten(2, 3) @ v.codes.int().unflatten(1, partitions)
    ).unflatten(2, split.shape[2:4])
    scale, minimum, sums = (
        None if x is None else x[:, :, None, None] for x in (v.scale, v.minimum, v.sums)
    )
    assert scale is not None and minimum is not None  # [H, N/n, 1, 1, Rv]
    return rounded.times(products, scale, minimum, sums).sum(1) / rounded.total.sum(
        1
    ).clamp(min=LEAST_SCALE)


def outputs_by_rank(shares: Tensor, v: Coded, groups: Tensor, tokens: int) -> Tensor:
    """As ``outputs``, of values in groups along the rank: ``groups`` [H, g, Rv] is 1
    where a channel belongs to one. Shares times scales are rounded in partitions of
    ``tokens`` tokens.
    """
    scaled = shares.unsqueeze(1) * v.scale.mT[:, :, None, None]  # [H, g, G, Q, N]
    rounded = Rounded.symmetric(
        scaled.unflatten(-1, (-1, tokens)).movedim(-2, 1), LEVELS
    )  # [H, N/n, g, G, Q, n]
    products = (
        rounded.whole.int().flatten(2, 4) @ v.codes.int().unflatten(1, (-1, tokens))
    ).unflatten(2, rounded.whole.shape[2:5])
    lowest = torch.einsum("hgqn,hnj->hjgq", shares, v.minimum).unsqueeze(-1)
    return (((rounded.step * products).sum(1) + lowest) * groups[:, :, None, None]).sum(
        1
    )
