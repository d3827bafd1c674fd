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
from kvlathe.runtime.sessions.torch_cuda.attention.inputs import Mass, StepInputs


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
        self.plan = plan
        self.layout = CacheLayout(plan)
        self.scales = scales
        self.pool = pool
        self.sinks = sinks
        kept = [i for i, lane in enumerate(plan.lanes) if not lane.removed]
        self._row_of = {lane: row for row, lane in enumerate(kept)}
        self._fresh: dict[int, int] = {}
        for b, bucket in enumerate(plan.index.buckets):
            if bucket.is_hot:
                self._fresh |= dict.fromkeys(bucket.lanes, b)

    def queue(self, layer: int, queries: Tensor, step: StepInputs) -> None:
        """Fill ``step.mass`` of one layer, where it is asked for. ``queries`` [T, sum of
        G * rank_k] as the kernels take them; the step's K is in its pages. All K is in
        unquantized pages: nothing is sealed before a prefix is compacted."""
        if step.mass is None:
            return
        for b, rows in enumerate(step.mass.rows):
            if len(rows):
                self._sequence(layer, queries, step, step.mass, b)

    def _sequence(
        self, layer: int, queries: Tensor, step: StepInputs, mass: Mass, b: int
    ) -> None:
        page, group = self.plan.page_tokens, self.plan.model.group_size
        widths = [table.shape[1] * page for table in step.page_tables]
        first, end = mass.starts[b], mass.starts[b + 1]
        observed = mass.rows[b]
        own = queries[observed]
        column = 0
        for place, lane in enumerate(self.plan.index.active(layer)):
            index = layer * self.plan.model.kv_heads + lane.head
            bucket = self._fresh[index]
            cached = mass.lengths[b][bucket]
            table = step.page_tables[bucket][b]
            keys = self._keys(index, bucket, table, cached + end - first)
            rank = lane.rank_k
            stop = column + group * rank
            heads = own[:, column:stop]
            heads = heads.unflatten(1, (group, rank)).float()
            column = stop
            sinks = None
            if self.sinks:
                sinks = self.sinks[layer][place]
            seen = observed - first
            seen += cached
            given = self._largest(layer, heads, keys, seen, sinks)
            lane_row = self._row_of[index]
            row = mass.largest[b, lane_row]
            start = sum(widths[:bucket])
            stop_cached = start + cached
            row[start:stop_cached] = given[:cached]
            start = sum(widths)
            stop_fresh = start + end - first
            row[start:stop_fresh] = given[cached:]

    def _keys(self, lane: int, bucket: int, table: Tensor, count: int) -> Tensor:
        """The first ``count`` keys of a lane in the pages of a bucket, [count, rank]
        float32."""
        page = self.plan.page_tokens
        rank = self.plan.lanes[lane].rank_k
        stride = self.layout.page_stride[bucket]
        offsets = self.layout.lane_offsets(bucket, lane)
        start = offsets.k
        pages = self.pool.numel() // stride
        whole = pages * stride
        every = self.pool[:whole].view(pages, stride)
        size = page * rank * torch.float16.itemsize
        end = start + size
        held = -(-count // page)
        wanted = table[:held].long()
        own = every[:, start:end]
        own = own.index_select(0, wanted)
        keys = own.view(torch.float16)
        keys = keys.view(-1, rank)
        return keys[:count].float()

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
        count = len(keys)
        group = heads.shape[1]
        scale = self.scales[layer]
        bound = self.plan.model.softcap
        columns = torch.arange(count, device=keys.device)
        most = keys.new_full((count,), -torch.inf)
        for some in self._tiles(len(heads), group, count):
            scores = heads[some] @ keys.T
            scores *= scale
            if bound:
                scores.div_(bound).tanh_().mul_(bound)
            own = places[some, None]
            later = columns > own
            scores.masked_fill_(later[:, None], -torch.inf)
            whole = scores.logsumexp(-1)
            if sinks is not None:
                whole = torch.logaddexp(whole, sinks.float())
            scores -= whole[..., None]
            largest = scores.amax((0, 1))
            most = torch.maximum(most, largest)
        return most.exp()

    @staticmethod
    def _tiles(rows: int, group: int, keys: int) -> Iterator[slice]:
        """Rows whose scores exist at a time."""
        count = max(1, TILE // (group * keys))
        for first in range(0, rows, count):
            yield slice(first, first + count)
