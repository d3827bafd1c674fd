"""Attention of one lane over one whole sequence by a fused kernel: every token sees its
own page as it is, and every earlier page as it is sealed.

Both are one list of keys, so it is one softmax. Queries come in blocks. What none of a
block sees is not read: that is most of a long sequence, where the lane has a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.export.attention.windows import LaneWindows

QUERIES = 512
"""Queries of a block, rounded to whole pages."""


@dataclass(frozen=True)
class LaneTokens:
    """k [T, Rk] and v [T, Rv] of one lane; ``sealed_k`` and ``sealed_v``, the same of
    its whole pages as they are read back; ``window`` of this lane, or None."""

    k: Tensor
    v: Tensor
    sealed_k: Tensor
    sealed_v: Tensor
    page: int
    window: LaneWindows | None

    def attended(self, q: Tensor, places: Tensor | None = None) -> Tensor:
        """q [G, T, Rk], scaled -> [G, T, Rv], or [G, R, Rv] at ``places`` [R],
        ascending. Widths are evened out, which fused kernels want."""
        group = q.shape[0]
        rank_v = self.v.shape[-1]
        width = max(q.shape[-1], rank_v)
        q = _pad(q, width)  # [G, T, width]
        if places is None:
            places = torch.arange(q.shape[1], device=self.k.device)
        outputs: list[Tensor] = []
        for block in self._blocks(places):
            k, v, seen = self._seen_by(block)
            k = _pad(k, width)
            v = _pad(v, width)
            out = F.scaled_dot_product_attention(
                q[None, :, block],
                k.expand(1, group, -1, -1),
                v.expand(1, group, -1, -1),
                seen[None, None],
                scale=1.0,
            )
            outputs.append(out[0, ..., :rank_v])
        return torch.cat(outputs, 1)

    def _blocks(self, places: Tensor) -> Iterator[Tensor]:
        return iter(places.split(max(1, QUERIES // self.page) * self.page))

    def _seen_by(self, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values for the queries at these places, and which each one sees, [Q,
        N]. Tokens from the first query's page on come last, as they are."""
        last = int(queries[-1])
        earlier = self._earlier(queries, last // self.page * self.page)
        sealed_k = self.sealed_k[earlier]
        sealed_v = self.sealed_v[earlier]
        fresh = torch.arange(
            int(queries[0]) // self.page * self.page, last + 1, device=queries.device
        )
        k = torch.cat([sealed_k, self.k[fresh]])  # [N, Rk]
        v = torch.cat([sealed_v, self.v[fresh]])  # [N, Rv]
        rows = queries[:, None]  # [Q, 1]
        places = torch.cat([earlier, fresh])  # [N]
        hidden = self._hidden(queries, places)
        own_page = rows // self.page
        of_page = places // self.page
        in_earlier = of_page < own_page  # [Q, N]: sealed, so a page before the query's
        in_own = of_page == own_page  # [Q, N]: still hot
        count = len(earlier)
        in_earlier[:, count:] = False  # tokens that are not read back
        in_own[:, :count] = False  # tokens that are
        seen = in_earlier | in_own
        seen &= places <= rows
        seen &= ~hidden
        return k, v, seen

    def _earlier(self, queries: Tensor, whole: int) -> Tensor:
        """Places below ``whole`` that any of the queries sees: windows only move on, so
        the first query sees farthest back."""
        places = torch.arange(whole, device=queries.device)
        return places[~self._hidden(queries[:1], places)[0]]

    def _hidden(self, queries: Tensor, places: Tensor) -> Tensor:
        """[Q, N] behind the lane's window."""
        if self.window is None:
            return torch.zeros(
                (len(queries), len(places)), dtype=torch.bool, device=places.device
            )
        return self.window.hidden(queries[None], places[None])[0]


def _pad(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))
