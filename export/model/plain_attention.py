"""PlainAttention: a layer's attention over one whole sequence at full rank, as the
model itself computes it. Calibration and the price of forms read its softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.export.attention.softmax_state import capped
from kvlathe.export.model.spec import DecoderSpec


@dataclass(frozen=True)
class PlainAttention:
    """Scores are scale * q.k; ``window``: tokens that a query sees, its own included
    (0: all); ``softcap`` bounds scores where it is not 0; ``sinks`` [Hq]: a logit of
    each query head beside its scores, or None."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @classmethod
    def of(
        cls, spec: DecoderSpec, layer: int, sinks: Tensor | None = None
    ) -> PlainAttention:
        return cls(
            scale=spec.scale(layer),
            window=spec.windows[layer],
            softcap=spec.family.attn_softcap,
            sinks=sinks,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of q [Hq, T, d] over k [H, T, d] and v [H or Hq, T, d] ->
        [Hq, T, d]."""
        heads = q.shape[0]
        k = k.repeat_interleave(heads // k.shape[0], 0)
        v = v.repeat_interleave(heads // v.shape[0], 0)
        if self.softcap or self.sinks is not None:
            seen = seen_tokens(q.shape[1], self.window, q.device)
            return self.shares(q @ k.mT * self.scale, seen) @ v
        mask = None
        if self.window:
            mask = seen_tokens(q.shape[1], self.window, q.device)
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], mask, is_causal=mask is None, scale=self.scale
        )[0]

    def shares(self, scores: Tensor, seen: Tensor) -> Tensor:
        """scores [Hq, Q, T], already scaled and lost afterwards, and which are ``seen``
        [Q, T] -> what each counts; with sinks, less than 1 in all."""
        return softmax_beside(
            capped(scores, self.softcap).masked_fill_(~seen, -torch.inf), self.sinks
        )


def softmax_beside(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [Hq, Q, T] over the last axis and a logit [Hq] of each
    head."""
    if sinks is None:
        return scores.softmax(-1)
    term = sinks[:, None, None].to(scores.dtype)
    return (scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), term)).exp()


def seen_tokens(tokens: int, window: int, device: torch.device) -> Tensor:
    """[T, T] of one whole sequence: the tokens that each query sees, the newest
    ``window`` up to its own; 0 is all."""
    places = torch.arange(tokens, device=device)
    behind = places[:, None] - places
    earlier = behind >= 0
    return earlier & (behind < window) if window else earlier
