"""The price of a step before and after the model: schedule, pages, step arrays, commit.
A session that computes nothing.

python -m benchmarks.scheduler [--steps 200] [--context 2048]

Prints a table and one JSON line; fails above 1 ms a step of processor time at 32
sequences or 2.5 ms at 256. Wall time stands beside it: what other processes take is not
ours. Sampling and text are not part of it. Every sequence decodes; the plans have one
bucket, two buckets, and pages that seal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence as Items

import numpy as np

from benchmarks.support.commands import parser_of
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.prompt import Whole
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.page_moves import PageMoves
from kvlathe.runtime.sessions.protocols import Session, StepPlan
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams

MOST_MS = {32: 1.0, 256: 2.5}
VOCABULARY = 16


class Idle(Session):
    """A session whose every next token is 0."""

    def run(self, step: StepPlan) -> np.ndarray:
        return np.zeros((len(step.logit_rows), VOCABULARY), np.float32)

    def apply(self, moves: Items[PageMoves]) -> None: ...
    def write_page(self, bucket: int, page: int, data: bytes) -> None: ...
    def read_page(self, bucket: int, page: int) -> bytes:
        return b""


def plans() -> dict[str, CompressionPlan]:
    shape = ModelShape(1, 2, 2, 16, 32, VOCABULARY, 1 << 20)
    lanes = tuple(Lane(0, h, 16, 16, 16) for h in range(2))
    hot, cold = Tier(16, 16), Tier(8, 8)
    forms = {
        "one bucket": (Group((0, 1), hot),),
        "two buckets": (Group((0,), hot), Group((1,), hot)),
        "sealed": (Group((0, 1), hot, (cold,), SEAL),),
    }
    return {
        name: CompressionPlan(shape, lanes, groups) for name, groups in forms.items()
    }


def milliseconds(
    plan: CompressionPlan, batch: int, context: int, steps: int
) -> np.ndarray:
    """[steps, 2] Processor time and wall time of steps of ``batch`` sequences that
    decode from about ``context`` tokens on."""
    layout = CacheLayout(plan)
    most = context + 128 + steps
    pool = PagePool(
        layout, 2 * batch * (layout.bytes_for(most) + 2 * sum(layout.page_stride))
    )
    session = Idle()
    engine = Engine(
        session, pool, Scheduler(pool, session, Limits(batch, 8192, most, most)), ()
    )
    for i in range(batch):
        prompt = [1] * (context + i % 64)
        params = SamplingParams(max_new_tokens=steps + 2)
        sequence = Sequence(
            prompt,
            len(prompt),
            pool.open(),
            Whole.cut(len(prompt), plan.prefill_chunk),
            Sampler(params),
            arrival=i,
        )
        while count := sequence.next_tokens(plan.prefill_chunk):
            pool.commit(
                pool.reserve(sequence.table, count, sequence.seals_after(count))
            )
            sequence.cached += count
        sequence.tokens.append(0)
        engine.scheduler.running.append(sequence)
    found = []
    for _ in range(steps):
        started = np.array([time.thread_time(), time.perf_counter()])
        chunks = engine.scheduler.schedule().chunks
        engine.run(chunks)
        found.append(
            1e3 * (np.array([time.thread_time(), time.perf_counter()]) - started)
        )
        for chunk in chunks:
            chunk.sequence.tokens.append(0)
    return np.array(found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--context", type=int, default=2048, help="tokens cached by each sequence"
    )
    args = parser.parse_args()
    rows = []
    print(
        f"{'plan':12} {'batch':>5} {'cpu ms':>8} {'p95':>7} {'wall ms':>8} {'p95':>7}"
    )
    for name, plan in plans().items():
        for batch in MOST_MS:
            times = np.quantile(
                milliseconds(plan, batch, args.context, args.steps), [0.5, 0.95], axis=0
            )
            row = dict(
                zip(
                    ("cpu_ms", "wall_ms", "cpu_p95_ms", "wall_p95_ms"),
                    times.ravel().tolist(),
                    strict=True,
                )
            )
            rows.append({"plan": name, "batch": batch, **row})
            shown = (
                row["cpu_ms"],
                row["cpu_p95_ms"],
                row["wall_ms"],
                row["wall_p95_ms"],
            )
            print(
                f"{name:12} {batch:5} {shown[0]:8.3f} {shown[1]:7.3f} {shown[2]:8.3f} {shown[3]:7.3f}"
            )
    print(json.dumps({"context": args.context, "steps": args.steps, "rows": rows}))
    sys.exit(any(row["cpu_ms"] > MOST_MS[row["batch"]] for row in rows))


if __name__ == "__main__":
    main()
