"""Observers of attention: they keep what the observed rows of a step attend.

``Observer`` adds it to the scores in the pages, by a kernel, where a plan ranks tokens.
``LargestShares`` finds the largest probability that observed rows give each token, by
which prefixes are compacted (docs/kvzip.md). Torch computes it from the queries and from
the keys in the pages, in a softmax of its own beside the kernels'. It happens once a
prefix, so it may take longer than attention does; scores are float32 and exist a tile at
a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import AttendDecodeArgs, LayerForm
from kvlathe.runtime.native.observing import DeviceStep, LayerScores
from kvlathe.runtime.sessions.gpu.side_memory import TILE
from kvlathe.runtime.sessions.torch_cuda.inputs import Mass, StepInputs


class Observer:
    """Adds what the observed rows of a step attend to the scores in the pages."""

    def __init__(
        self,
        plan: CompressionPlan,
        forms: Mapping[int, LayerForm],
        device: torch.device,
        most_rows: int,
    ) -> None:
        """``forms`` by layer. ``most_rows``: tokens of the largest step. Its memory is
        twice what their states need, so that blocks can share the rows of some."""
        layout = CacheLayout(plan)
        self.layers = {i: LayerScores(layout, i, form) for i, form in forms.items()}
        of_row = 2 * max(form.group * form.heads for form in forms.values())
        size = 2 * most_rows * of_row
        self.states = torch.empty(size, dtype=torch.float32, device=device)

    def queue(
        self, layer: int, call: AttendDecodeArgs, queries: Tensor, step: StepInputs
    ) -> None:
        """As StepObserver.queue. The kernel finds the queries in ``call``."""
        observed = step.observed
        if observed is None:
            return
        fields = DeviceStep(
            call.batch,
            len(step.lengths),
            observed.most,
            step.cu_seqlens_q.data_ptr(),
            observed.positions.data_ptr(),
            observed.rows.data_ptr(),
            observed.starts.data_ptr(),
            step.lengths.data_ptr(),
            [table.data_ptr() for table in step.page_tables],
            [table.shape[1] for table in step.page_tables],
        )
        states = (self.states.data_ptr(), self.states.nbytes)
        self.layers[layer].observe(call, fields, states)


class LargestShares:
    """The largest share that observed rows give each token, in the lanes of every layer
    of a plan that compacts prefixes.

    With s[r, g, n] = softcap(scale * q'[r, g] . k'[n]) for the tokens n up to r's own
    place, and z[r, g] = log(sum_n exp s[r, g, n] + exp sink[g]):

        largest[n] = max over r, g of exp(s[r, g, n] - z[r, g])
    """

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

    def queue(
        self, layer: int, call: AttendDecodeArgs, queries: Tensor, step: StepInputs
    ) -> None:
        """As StepObserver.queue: fill ``step.mass``, where it is asked for."""
        self.fill(layer, queries, step)

    def fill(self, layer: int, queries: Tensor, step: StepInputs) -> None:
        """Fill ``step.mass`` of one layer, where it is asked for. ``queries`` [T, sum of
        G * rank_k] as the kernels take them; the step's K is in its pages. All K is in
        unquantized pages: nothing is sealed before a prefix is compacted."""
        if step.mass is None:
            return
        for b, rows in enumerate(step.mass.rows):
            if len(rows):
                self._fill_sequence(layer, queries[rows], step, step.mass, b)

    def _fill_sequence(
        self, layer: int, queries: Tensor, step: StepInputs, mass: Mass, b: int
    ) -> None:
        """Fill mass.largest[b, lane, :] for the lanes of one layer: the largest softmax
        share of every cached and every new token of sequence ``b``. ``queries`` [R, sum
        of G * rank_k]: of its observed rows alone.

        A row of ``largest`` has the places of all page tables, one after the other, and
        then those of the step's new tokens.
        """
        group = self.plan.model.group(layer)
        widths = [table.shape[1] * self.plan.page_tokens for table in step.page_tables]
        first, end = mass.starts[b], mass.starts[b + 1]
        lanes = self.plan.index.active(layer)
        # [R, G * rank_k] of each lane
        of_lanes = queries.split([group * lane.rank_k for lane in lanes], 1)
        for place, (lane, own) in enumerate(zip(lanes, of_lanes, strict=True)):
            index = self.plan.index.number(layer, lane.head)
            bucket = self.plan.index.hot_bucket[index]
            cached = mass.lengths[b][bucket]
            table = step.page_tables[bucket][b]
            given = self._largest(  # [cached + new]
                layer,
                own.unflatten(1, (group, lane.rank_k)).float(),  # [R, G, rank_k]
                self._keys(index, bucket, table, cached + end - first),
                cached + mass.rows[b] - first,  # [R]: the query's own place
                self.sinks[layer][place] if self.sinks else None,
            )
            row = mass.largest[b, self._row_of[index]]  # [N]
            at, new = sum(widths[:bucket]), sum(widths)
            row[at : at + cached] = given[:cached]
            row[new : new + end - first] = given[cached:]

    def _keys(self, lane: int, bucket: int, table: Tensor, count: int) -> Tensor:
        """The first ``count`` keys [count, rank] float32 of a lane, in the pages of a
        bucket that ``table`` [M] lists."""
        page, rank = self.plan.page_tokens, self.plan.lanes[lane].rank_k
        stride = self.layout.page_stride[bucket]
        start = self.layout.lane_offsets(bucket, lane).k
        pages = self.pool.numel() // stride
        every = self.pool[: pages * stride].view(pages, stride)
        held = table[: -(-count // page)].long()  # [pages that hold some]
        size = page * rank * torch.float16.itemsize
        own = every[:, start : start + size].index_select(0, held)  # [held, size] uint8
        return own.view(torch.float16).view(-1, rank)[:count].float()

    def _largest(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        places: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """The largest share [N] that ``queries`` [R, G, rank] give each of ``keys``
        [N, rank]; the query at ``places`` [R] sees keys up to its own. ``sinks`` [G]."""
        count, group = len(keys), queries.shape[1]
        bound = self.plan.model.softcap
        columns = torch.arange(count, device=keys.device)
        most = keys.new_full((count,), -torch.inf)
        for some in self._tiles(len(queries), group, count):
            scores = (queries[some] @ keys.T).mul_(self.scales[layer])  # [r, G, N]
            if bound:
                scores.div_(bound).tanh_().mul_(bound)
            later = columns > places[some, None]  # [r, N]
            scores.masked_fill_(later[:, None], -torch.inf)
            whole = scores.logsumexp(-1)  # [r, G]
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
