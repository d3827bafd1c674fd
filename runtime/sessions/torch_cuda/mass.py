"""LargestShares: the largest probability that observed rows give each token, by which
prefixes are compacted (docs/kvzip.md).

Torch computes it from the queries and from the keys in the pages, in a softmax of its own
beside the kernels'. It happens once a prefix, so it may take longer than attention does;
scores are float32 and exist a tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.gpu.side_memory import TILE
from kvlathe.runtime.sessions.torch_cuda.inputs import Mass, StepInputs


class LargestShares:
    """Of the lanes of every layer of a plan that compacts prefixes."""

    def __init__(
        self,
        plan: CompressionPlan,
        scales: Sequence[float],
        pool: Tensor,
        sinks: Sequence[Tensor] = (),
    ) -> None:
        """``scales`` of each layer, ``pool`` uint8; ``sinks`` [H, G] of each layer, where
        the model has sink logits."""
        self.plan, self.layout = plan, CacheLayout(plan)
        self.scales, self.pool, self.sinks = scales, pool, sinks
        kept = [i for i, lane in enumerate(plan.lanes) if not lane.removed]
        self._row_of = {lane: row for row, lane in enumerate(kept)}
        self._fresh: dict[int, int] = {}
        for b, bucket in enumerate(plan.buckets):
            if bucket.source is None:
                self._fresh |= dict.fromkeys(bucket.lanes, b)

    def queue(self, layer: int, queries: Tensor, step: StepInputs) -> None:
        """Fill ``step.mass`` of one layer, where it is asked for. ``queries`` [T, sum of
        G * rank_k] as the kernels take them; the step's K is in its pages. All K is in
        unquantized pages: nothing is sealed before a prefix is compacted."""
        if step.mass is None:
            return
        for b, rows in enumerate(step.mass.rows):
            if rows:
                self._sequence(layer, queries, step, step.mass, b)

    def _sequence(
        self, layer: int, queries: Tensor, step: StepInputs, mass: Mass, b: int
    ) -> None:
        page, group = self.plan.page_tokens, self.plan.model.group_size
        widths = [table.shape[1] * page for table in step.page_tables]
        first, end = mass.starts[b], mass.starts[b + 1]
        observed = torch.tensor(mass.rows[b], device=queries.device)
        own = queries[observed]
        column = 0
        for place, lane in enumerate(self.plan.active(layer)):
            index = layer * self.plan.model.kv_heads + lane.head
            bucket = self._fresh[index]
            cached = mass.lengths[b][bucket]
            table = step.page_tables[bucket][b]
            keys = self._keys(index, bucket, table, cached + end - first)
            stop = column + group * lane.rank_k
            heads = own[:, column:stop].unflatten(1, (group, lane.rank_k)).float()
            column = stop
            sinks = self.sinks[layer][place] if self.sinks else None
            given = self._largest(layer, heads, keys, observed - first + cached, sinks)
            row = mass.largest[b, self._row_of[index]]
            start = sum(widths[:bucket])
            row[start : start + cached] = given[:cached]
            start = sum(widths)
            row[start : start + end - first] = given[cached:]

    def _keys(self, lane: int, bucket: int, table: Tensor, count: int) -> Tensor:
        """The first ``count`` keys of a lane in the pages of a bucket, [count, rank]
        float32."""
        page, rank = self.plan.page_tokens, self.plan.lanes[lane].rank_k
        stride = self.layout.page_stride[bucket]
        start = self.layout.lane_offsets(bucket, lane).k
        pages = self.pool.numel() // stride
        every = self.pool[: pages * stride].view(pages, stride)
        size = page * rank * torch.float16.itemsize
        wanted = table[: -(-count // page)].long()
        own = every[:, start : start + size].index_select(0, wanted)
        return own.view(torch.float16).view(-1, rank)[:count].float()

    def _largest(
        self,
        layer: int,
        heads: Tensor,
        keys: Tensor,
        places: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """The largest share [N] that queries ``heads`` [R, G, rank] give each of ``keys``
        [N, rank]; the query at ``places`` [R] sees keys up to its own."""
        most = keys.new_full((len(keys),), -torch.inf)
        for some in self._tiles(len(heads), heads.shape[1], len(keys)):
            scores = heads[some] @ keys.T
            scores *= self.scales[layer]
            if self.plan.model.softcap:
                bound = self.plan.model.softcap
                scores.div_(bound).tanh_().mul_(bound)
            seen = torch.arange(len(keys), device=keys.device)
            later = seen > places[some, None]
            scores.masked_fill_(later[:, None], -torch.inf)
            whole = scores.logsumexp(-1)
            if sinks is not None:
                whole = torch.logaddexp(whole, sinks.float())
            scores -= whole[..., None]
            most = torch.maximum(most, scores.amax((0, 1)))
        return most.exp()

    @staticmethod
    def _tiles(rows: int, group: int, keys: int) -> Iterator[slice]:
        """Rows whose scores exist at a time."""
        count = max(1, TILE // (group * keys))
        for first in range(0, rows, count):
            yield slice(first, first + count)
