"""DeviceScores: what tokens are ranked by, inside their pages on the GPU. The same bytes as
those of runtime/sessions/host/page_scores.py; here torch reads and copies them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.sessions.gpu.step_buffer import observed_rows
from kvlathe.runtime.sessions.protocols import Int32, Scores, StepPlan
from kvlathe.runtime.sessions.torch_cuda.device import int64_on


class DeviceScores:
    """``pool``: uint8 on the GPU. Everything is queued on the current stream; only
    ``read`` waits."""

    def __init__(self, layout: CacheLayout, pool: Tensor) -> None:
        self.layout = layout
        self.plan = layout.plan
        self.device = pool.device
        self._fields: dict[int, list[Tensor]] = {}
        for bucket, stride in enumerate(layout.page_stride):
            if self.plan.index.buckets[bucket].scored:
                pages = pool.numel() // stride
                end = pages * stride
                table = pool[:end].view(pages, stride)
                self._fields[bucket] = self._fields_of(bucket, table)
        self._undo: list[tuple[int, Tensor, Tensor]] = []
        self._shared: dict[tuple[int, int], Tensor] = {}

    def _fields_of(self, bucket: int, table: Tensor) -> list[Tensor]:
        """Attention float32, then position int32 where it is kept: views [pages, lanes,
        P]."""
        lanes, p = len(self.plan.index.buckets[bucket].lanes), self.plan.page_tokens
        size = 4 * lanes * p
        start = self.layout.scores_at(bucket)
        kinds = [torch.float32]
        if self.plan.index.keeps_positions:
            kinds.append(torch.int32)
        fields: list[Tensor] = []
        for kind in kinds:
            numbers = table.view(kind)[:, start // 4 : (start + size) // 4]
            fields.append(numbers.unflatten(1, (lanes, p)))
            start += size
        return fields

    # -- a step ------------------------------------------------------------------------
    def remember(self, step: StepPlan) -> None:
        """Before a step: keep what it will add to. Tokens that it brings begin with it."""
        self._undo.clear()
        rows = observed_rows(step)
        starts = np.searchsorted(rows, step.cu_seqlens_q)
        observed = np.flatnonzero(np.diff(starts))
        if not len(observed):
            return
        for bucket, fields in self._fields.items():
            held = -(-step.lengths[:, bucket] // self.plan.page_tokens)
            tables = step.page_tables[bucket]
            pages = np.concatenate([tables[b, : held[b]] for b in observed])
            if len(pages):
                places = int64_on(pages, self.device)
                self._undo.append((bucket, places, fields[0][places]))

    def undo(self) -> None:
        """Drop what the last step has added."""
        for bucket, pages, old in self._undo:
            self._fields[bucket][0][pages] = old
        self._undo.clear()

    # -- between steps -----------------------------------------------------------------
    def read(self, bucket: int, pages: Sequence[int], tokens: int) -> Scores:
        """Scores of the first ``tokens`` tokens in ``pages`` of a bucket. Waits for the GPU."""
        arrays = [x.cpu().numpy() for x in self.of(bucket, pages, tokens)]
        position = arrays[1] if self.plan.index.keeps_positions else None
        return Scores(arrays[0], position)

    def of(self, bucket: int, pages: Sequence[int], tokens: int) -> list[Tensor]:
        """Attention float32 and, where it is kept, position int32 of the first ``tokens``
        tokens in ``pages``: [lanes, tokens]."""
        places = int64_on(pages, self.device)
        found: list[Tensor] = []
        for field in self._fields[bucket]:
            by_lane = field[places].transpose(0, 1)
            found.append(by_lane.flatten(1)[:, :tokens])
        return found

    def given(self, layer: int, tables: Sequence[Int32], tokens: int) -> Tensor:
        """What observed rows gave each of the first ``tokens`` tokens of a sequence, in all
        lanes of a layer together: float64 [tokens]. ``tables``: its pages in each
        bucket, of which the fresh ones hold these tokens."""
        pages = -(-tokens // self.plan.page_tokens)
        total = torch.zeros(tokens, dtype=torch.float64, device=self.device)
        for index, fields in self._fields.items():
            bucket = self.plan.index.buckets[index]
            lanes = sorted(bucket.lanes)
            layers = [self.plan.lanes[lane].layer for lane in lanes]
            own = [i for i, of_lane in enumerate(layers) if of_lane == layer]
            if bucket.is_hot and own:
                places = int64_on(tables[index][:pages], self.device)
                every = fields[0][places]
                of_lanes = every[:, int64_on(own, self.device)]
                given = of_lanes.double().sum(1)
                total += given.flatten()[:tokens]
        return total

    def forget(self, bucket: int, pages: Sequence[int]) -> None:
        """Set the observed attention of all tokens in ``pages`` to 0."""
        if bucket in self._fields and len(pages):
            places = int64_on(pages, self.device)
            # A plain 0 would be copied from the host, which waits for the GPU.
            self._fields[bucket][0].index_fill_(0, places, 0)

    def carry(
        self,
        source: int,
        pages: Sequence[int],
        target: int,
        target_pages: Sequence[int],
    ) -> None:
        """The scores of sealed pages go with their tokens where they are ranked on."""
        if source not in self._fields or target not in self._fields:
            return
        places = int64_on(pages, self.device)
        own = self._lanes_of(source, target)
        targets = int64_on(target_pages, self.device)
        fields = zip(self._fields[source], self._fields[target], strict=True)
        for known, copy in fields:
            copy[targets] = known[places][:, own]

    def _lanes_of(self, source: int, target: int) -> Tensor:
        """The places among a bucket's lanes of those that a target has, on the GPU."""
        pair = source, target
        if pair not in self._shared:
            lanes = self.plan.index.buckets[source].lanes
            wanted = self.plan.index.buckets[target].lanes
            own = np.searchsorted(lanes, wanted)
            self._shared[pair] = int64_on(own, self.device)
        return self._shared[pair]
