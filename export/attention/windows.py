"""LaneWindows: which tokens a lane's window hides from its queries.

H lanes, Q queries, N tokens. Places count the tokens that a lane holds, sealed ones
first; pages that are gone are whole, so places do as well as positions
(plan/sight.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.sight import NO_END, Sight

NEVER = -1e30
"""A score that no softmax sees beside others. Finite: all of a part may be hidden."""


@dataclass(frozen=True)
class LaneWindows:
    """``sink``, ``recent``, ``exact`` [H, 1] of each lane, as LayerTables has them; P
    tokens a page."""

    sink: Tensor
    recent: Tensor
    exact: Tensor
    page_tokens: int

    def hidden(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """[H, Q, N], from the places of queries [H or 1, Q] and tokens [H or 1, N]."""
        size = self.page_tokens
        own_page = queries.div(size, rounding_mode="floor") * size
        first = torch.maximum(own_page - self.recent, queries - self.exact + 1)
        return (tokens >= self.sink)[:, None] & (tokens[:, None] < first[:, :, None])

    @classmethod
    def of_sights(
        cls, sights: Sequence[Sight], page_tokens: int, device: torch.device
    ) -> LaneWindows | None:
        """Those of lanes that see so; None where all see everything."""
        if not any(sight.is_less for sight in sights):
            return None
        numbers = [(x.sink, x.recent, x.exact or NO_END) for x in sights]
        sink, recent, exact = torch.tensor(numbers, device=device).T[..., None]
        return cls(sink, recent, exact, page_tokens)

    def of(self, head: int) -> LaneWindows:
        """That of one lane."""
        own = slice(head, head + 1)
        return LaneWindows(
            self.sink[own], self.recent[own], self.exact[own], self.page_tokens
        )


def seen_from(
    queries: Tensor, tokens: Tensor, windows: LaneWindows | None, group: int
) -> Tensor:
    """The ``tokens`` [N] of one whole sequence that ``queries`` [Q] see, both places in
    it; [1, 1, Q, N], or [1, H * group, Q, N] behind windows."""
    seen = tokens <= queries[:, None]
    if windows is None:
        return seen[None, None]
    hidden = windows.hidden(queries[None], tokens[None])
    return (seen & ~hidden).repeat_interleave(group, 0)[None]


def window_tables(
    plan: CompressionPlan, layer: int
) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of a layer by node input name (LayerTables)."""
    active = plan.index.active(layer)
    lanes = [plan.index.number(layer, lane.head) for lane in active]
    held = [np.isin(lanes, bucket.lanes) for bucket in plan.index.buckets]
    sealed = [not bucket.is_hot for bucket in plan.index.buckets]
    numbers: list[tuple[int, int, int]] = []
    for lane in lanes:
        sight = plan.index.sight(lane)
        numbers.append((sight.sink, sight.recent, sight.exact or NO_END))
    holds = np.stack(held, 1)
    sink, recent, exact = np.array(numbers).T[:, :, None]
    return {
        "window_buckets": holds,
        "window_sealed": holds & np.array(sealed),
        "window_sink": sink,
        "window_recent": recent,
        "window_exact": exact,
    }
