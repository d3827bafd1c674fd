"""SoftmaxState: attention over some of the tokens, so that parts of a cache can be
attended one by one.

    lse = log(exp(lse_1) + exp(lse_2))
    o   = exp(lse_1 - lse) o_1 + exp(lse_2 - lse) o_2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SoftmaxState:
    """Attention over one list of tokens; two of them merge (FlashAttention, arXiv
    2205.14135). ``lse`` is log(sum exp score) [H, G, Q, 1], and ``out`` the mean of the
    values under that softmax [H, G, Q, Rv]."""

    lse: Tensor
    out: Tensor

    @classmethod
    def of(cls, scores: Tensor, output: Callable[[Tensor], Tensor]) -> SoftmaxState:
        """scores [H, G, Q, N]; ``output`` takes the mean of the values under shares of
        that shape."""
        scores = widened(scores)
        lse = scores.logsumexp(-1, keepdim=True)
        return cls(lse, output((scores - lse).exp()))

    @classmethod
    def causal(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor | None = None,
        softcap: float = 0.0,
    ) -> SoftmaxState:
        """q [H, G, N, Rk] already scaled, k [H, N, Rk], v [H, N, Rv]; query i sees
        tokens 0 .. i, but for those that are ``hidden`` [H, N, N]."""
        scores = capped(scores_of(q, k), softcap)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        if hidden is not None:
            later = later | hidden[:, None]
        return cls.of(
            scores.masked_fill(later, -torch.inf), lambda shares: means_of(shares, v)
        )

    def over(self, places: Tensor) -> SoftmaxState:
        """The same for all H lanes, lane h from place places[h]; lanes at place -1
        get an empty state."""
        count = len(places)
        lse = self.lse.new_full((count, *self.lse.shape[1:]), -torch.inf)
        out = self.out.new_zeros((count, *self.out.shape[1:]))
        kept = places >= 0
        sources = places[kept]
        lse[kept] = self.lse[sources]
        out[kept] = self.out[sources]
        return SoftmaxState(lse, out)

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """One softmax over both lists. At least one of them has tokens."""
        lse = torch.logaddexp(self.lse, other.lse)
        share = (self.lse - lse).exp(), (other.lse - lse).exp()
        return SoftmaxState(
            lse, (share[0] * self.out + share[1] * other.out).to(self.out.dtype)
        )

    def beside(self, sinks: Tensor) -> SoftmaxState:
        """One softmax over the list and the ``sinks`` [H, G]: one more term, whose
        value is zero."""
        lse = torch.logaddexp(self.lse, sinks[..., None, None].to(self.lse.dtype))
        return SoftmaxState(lse, ((self.lse - lse).exp() * self.out).to(self.out.dtype))


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Between -softcap and softcap, where that is not 0."""
    if not softcap:
        return scores
    return softcap * (widened(scores) / softcap).tanh()


def widened(x: Tensor) -> Tensor:
    """In float32 where x is float16."""
    return x.float() if x.dtype == torch.float16 else x


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """q [H, G, Q, R], k [H, N, R] -> [H, G, Q, N]."""
    return q @ k.unsqueeze(1).mT


def means_of(shares: Tensor, v: Tensor) -> Tensor:
    """shares [H, G, Q, N], v [H, N, R] -> [H, G, Q, R]."""
    return shares.to(v.dtype) @ v.unsqueeze(1)
