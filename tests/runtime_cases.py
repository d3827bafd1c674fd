"""What the runtime's tests share: small plans of every kind of bucket, and sessions to run them on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvlathe.engines.manifest import Limits
from kvlathe.export.decoder import Decoder
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import Bucket, CompressionPlan, Lane, ModelShape, Tier
from kvlathe.runtime.host_pages import HostPages
from kvlathe.runtime.session import StepPlan

MODEL = Path(__file__).resolve().parents[1] / "models" / "lathe-5m"
HOT, U8 = Tier(32, 32), Tier(8, 8, "rank", "token", 64, 64)
LIMITS = Limits(max_batch_size=8, max_num_tokens=1024, max_input_len=3072, max_seq_len=4096)


def plan_for(
    shape: ModelShape, tiers: tuple[Tier, ...], buckets: tuple[Bucket, ...], page: int = 64, chunk: int = 512
) -> CompressionPlan:
    """Every lane at full rank, nothing projected."""
    d = shape.head_dim
    lanes = tuple(Lane(i, h, d, d, d) for i in range(shape.layers) for h in range(shape.kv_heads))
    return CompressionPlan(shape, lanes, tiers, buckets, page_tokens=page, prefill_chunk=chunk)


def plans(shape: ModelShape, page: int = 64, chunk: int = 512) -> dict[str, CompressionPlan]:
    """The same model over one bucket, two buckets (even and odd lanes), and with full pages sealed into 8 bit."""
    every = tuple(range(shape.layers * shape.kv_heads))
    split = (Bucket(0, every[::2]), Bucket(0, every[1::2]))
    return {
        "one": plan_for(shape, (HOT,), (Bucket(0, every),), page, chunk),
        "split": plan_for(shape, (HOT,), split, page, chunk),
        "sealed": plan_for(shape, (HOT, U8), (Bucket(0, every), Bucket(1, every, source=0)), page, chunk),
        "sealed split": plan_for(
            shape,
            (HOT, U8, Tier(16, 16)),
            (Bucket(0, every), Bucket(1, every[:1], source=0), Bucket(2, every[1:], source=0)),
            page,
            chunk,
        ),
    }


class TorchSession(HostPages):
    """The decoder in torch over the same pages: what an exported engine is compared with."""

    def __init__(self, decoder: Decoder, arena_bytes: int) -> None:
        super().__init__(CacheLayout(decoder.plan), arena_bytes)
        self.decoder = decoder
        self.pools = {name: torch.from_numpy(view) for name, view in self.views.items()}

    @torch.inference_mode()
    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        tensor = torch.from_numpy
        logits, rows = self.decoder(
            tensor(step.input_ids),
            tensor(step.positions),
            tensor(step.query_starts),
            tensor(step.query_offsets),
            tensor(step.lengths),
            [tensor(table) for table in step.page_tables],
            self.pools,
            tensor(step.logit_rows),
        )
        self.append(step, rows.numpy())
        return logits.numpy()
