"""PagedDecoder: the torch decoder over the runtime's own pages. What ranks, evicts and
seals tokens is the engine's code, so plans that choose among tokens are measured by
what they will do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvlathe.export.folding.fold import fold
from kvlathe.export.methods.composition import Made
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.device import ahead
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.memory import memory_table
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.requests.forced import ForcedText
from kvlathe.runtime.requests.sequences import SequenceFactory
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.sessions.host.graphs import GraphSession, observation_weights
from kvlathe.runtime.sessions.host.pages import typed_views
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.tokenizer import Tokenizer

SPARE = 1.25
"""Memory of the pages, beside what a sequence needs at its peak."""


class DecoderGraph:
    """One stage of the decoder as a graph of a session; its weights are where the
    checkpoint's are."""

    def __init__(self, checkpoint: Checkpoint, made: Made, stage: int) -> None:
        plan, _ = made
        staged = stage if plan.stages else None
        with torch.device("meta"):
            decoder = Decoder(checkpoint.spec, plan, stage=staged)
        folded = fold(checkpoint, *made)
        names = decoder.state_dict().keys() & set(folded)
        for name, weight in ahead(
            lambda name: (name, folded[name].float()), sorted(names), checkpoint.device
        ):
            decoder.load_state_dict({name: weight}, strict=False, assign=True)
        self.device = checkpoint.device
        self.decoder = decoder.to(self.device).eval()
        self.stage = stage
        self.buckets: Sequence[int] = plan.index.buckets_of(stage)
        layers = plan.index.layers_of(stage)
        first = plan.index.kept_before(layers.start)
        self.lanes = slice(first, plan.index.kept_before(layers.stop))
        self._unit = plan.index.unit
        self._pools: dict[str, torch.Tensor] = {}

    def bind(self, memory: npt.NDArray[np.uint8]) -> None:
        """Read the cache from ``memory``."""
        views = typed_views(memory, self._unit)
        self._pools = {name: torch.from_numpy(view) for name, view in views.items()}

    @torch.inference_mode()
    def run(
        self, step: StepPlan, source: npt.NDArray[np.float32] | None
    ) -> list[np.ndarray]:
        """As StageGraph.run."""

        def there(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

        outputs = self.decoder(
            there(step.input_ids if source is None else source),
            there(step.positions),
            there(step.cu_seqlens_q),
            there(step.query_offsets),
            there(step.lengths[:, self.buckets]),
            [there(step.page_tables[bucket]) for bucket in self.buckets],
            {name: pool.to(self.device) for name, pool in self._pools.items()},
            there(step.logit_rows),
            there(observation_weights(step)),
        )
        return [output.cpu().numpy() for output in outputs]


class DecoderSession(GraphSession):
    """The torch decoder as a session."""

    attention = "torch, before there is an engine"


class PagedDecoder:
    """Logits of a plan's model through the cache that its engine will have, of sequences
    of up to ``longest`` tokens."""

    def __init__(self, checkpoint: Checkpoint, made: Made, longest: int) -> None:
        plan, _ = made
        chunk = plan.prefill_chunk
        limits = Limits(1, chunk + 1, longest, longest)
        layout = CacheLayout(plan)
        (*_, row) = memory_table(layout, longest, 1)
        spare_pages = 4 * sum(layout.page_stride)
        arena = int(SPARE * max(row["peak"], row["steady"])) + spare_pages
        graphs = [
            DecoderGraph(checkpoint, made, stage) for stage in range(plan.index.graphs)
        ]
        session = DecoderSession(plan, limits, arena, graphs)
        pool = PagePool(layout, arena)
        scheduler = Scheduler(pool, session, limits, None)
        tokenizer = Tokenizer(checkpoint.path)
        self._engine = Engine(session, pool, scheduler, tokenizer.eos_ids)
        self._factory = SequenceFactory(plan, pool, scheduler, tokenizer)

    def logits(
        self, token_ids: Sequence[int], rows: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """[len(rows), V]: next-token logits after these places. The prompt goes up to
        the first of them; what follows is decoded."""
        ids = list(token_ids)
        text = ForcedText(self._engine, self._factory, ids, rows, None)
        return text.logits(lambda: False)
