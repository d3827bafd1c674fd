"""PlainAttention: a layer's attention over one whole sequence at full rank, as the
model itself computes it. Calibration and the price of forms read its softmax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from kvlathe.export.attention.softmax_state import capped
from kvlathe.export.model.spec import DecoderSpec

SCORES_AT_ONCE = 1 << 24
"""Scores in memory at a time, where no fused kernel keeps them to itself."""


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
        """Causal attention of q [Hq, T, d] over k [H, T, d] and v [H or Hq, T, dv] ->
        [Hq, T, dv]. Where a kernel cannot, queries come in blocks, whose scores are
        computed again for gradients."""
        heads, tokens = q.shape[:2]
        k = k.repeat_interleave(heads // k.shape[0], 0)
        v = v.repeat_interleave(heads // v.shape[0], 0)
        if not self.window and not self.softcap and self.sinks is None:
            return F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=self.scale
            )[0]
        widest = min(tokens, self.window + 1) if self.window else tokens
        size = max(1, SCORES_AT_ONCE // (heads * widest))
        if self.window:  # a block of n queries sees n more tokens than one
            size = min(size, max(self.window, 1))
        outputs: list[Tensor] = []
        for start in range(0, tokens, size):
            end = min(start + size, tokens)
            first = max(0, start + 1 - self.window) if self.window else 0
            block = partial(self._block, start=start, first=first)
            own = q[:, start:end], k[:, first:end], v[:, first:end]
            if torch.is_grad_enabled() and any(x.requires_grad for x in own):
                outputs.append(recomputed(block, *own, use_reentrant=False))
            else:
                outputs.append(block(*own))
        return torch.cat(outputs, 1)

    def _block(self, q: Tensor, k: Tensor, v: Tensor, start: int, first: int) -> Tensor:
        """Attention of queries from place ``start`` on over tokens from ``first`` on,
        every one with a query: [Hq, Q, d]."""
        places = torch.arange(start, start + q.shape[1], device=q.device)
        tokens = torch.arange(first, first + k.shape[1], device=q.device)
        seen = seen_from(places, tokens, self.window)
        return self.shares(q @ k.mT * self.scale, seen) @ v

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


def seen_from(queries: Tensor, tokens: Tensor, window: int) -> Tensor:
    """[Q, N]: which ``tokens`` [N] the ``queries`` [Q] see, both places of one whole
    sequence: the newest ``window`` up to their own; 0 is all."""
    earlier = tokens <= queries[:, None]
    return earlier & (tokens > queries[:, None] - window) if window else earlier
