"""Observer: what observed rows attend, added to the scores in the pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import AttendDecodeArgs, LayerForm
from kvlathe.runtime.native.observing import DeviceStep, LayerScores
from kvlathe.runtime.sessions.torch_cuda.attention.inputs import StepInputs


class Observer:
    """Adds what the observed rows of a step attend to the scores in the pages."""

    def __init__(
        self,
        plan: CompressionPlan,
        forms: Sequence[LayerForm],
        pool: Tensor,
        most_rows: int,
    ) -> None:
        """``most_rows``: tokens of the largest step."""
        self.layers: list[LayerScores] = []
        if not plan.index.ranked:
            return
        layout = CacheLayout(plan)
        self.layers = [LayerScores(layout, i, form) for i, form in enumerate(forms)]
        heads = max(form.heads for form in forms)
        size = 2 * most_rows * plan.model.group_size * heads
        self.states = torch.empty(size, dtype=torch.float32, device=pool.device)

    def queue(self, call: AttendDecodeArgs, layer: int, step: StepInputs) -> None:
        """``call``: the layer's attention, with its q and its stream."""
        observed = step.observed
        if observed is None:
            return
        form = DeviceStep(
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
        self.layers[layer].observe(call, form, states)
