"""Attention of one lane over one whole sequence by a fused kernel: every token sees its
own page as it is, and every earlier page as it is sealed; the nearest of these as newest
pages are, where those have a format of their own.

All are one list of keys, so it is one softmax. Queries come in blocks. What none of a
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
    its whole pages as they are read back; ``window`` of this lane, or None. ``young_k``
    and ``young_v`` are read in place of the ``recent`` sealed tokens before a query's
    page."""

    k: Tensor
    v: Tensor
    sealed_k: Tensor
    sealed_v: Tensor
    page: int
    window: LaneWindows | None
    young_k: Tensor
    young_v: Tensor
    recent: int = 0

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
        first, last = (int(queries[i]) // self.page * self.page for i in (0, -1))
        device = queries.device
        earlier = self._earlier(queries, max(0, last - self.recent))
        newest = torch.arange(max(0, first - self.recent), last, device=device)
        newest = newest[: len(newest) * bool(self.recent)]
        fresh = torch.arange(first, int(queries[-1]) + 1, device=device)
        k = torch.cat([self.sealed_k[earlier], self.young_k[newest], self.k[fresh]])
        v = torch.cat([self.sealed_v[earlier], self.young_v[newest], self.v[fresh]])
        rows = queries[:, None]  # [Q, 1]
        own_page = rows // self.page
        reach = self.recent // self.page
        # Pages between a query's own and a token's.
        far = own_page - earlier // self.page > reach
        near = own_page - newest // self.page
        near = (near > 0) & (near <= reach)
        own = own_page == fresh // self.page
        places = torch.cat([earlier, newest, fresh])  # [N]
        seen = torch.cat([far, near, own], 1)  # [Q, N]
        seen &= places <= rows
        seen &= ~self._hidden(queries, places)
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
