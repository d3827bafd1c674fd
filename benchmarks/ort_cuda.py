"""Steps of one model through ONNX Runtime's CUDA provider and through the cuda backend,
in one run on one GPU.

  python -m benchmarks.ort_cuda models/lathe-5m --compression none --batch 8 --tokens
  2048

Both build from the checkpoint in float16. Times are by the clock, around whole steps
that end with logits on the host, as the engine loop takes them; the best of five
rounds. Needs onnxruntime-gpu, cuda-python and torch.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.support.commands import parser_of
from kvlathe.engines.build import BuildConfig, build
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.protocols import StepPlan


def decode_step(llm: LLM, batch: int, tokens: int) -> StepPlan:
    """One token of ``batch`` sequences that pretend to have ``tokens`` cached, in pages
    of zeros."""
    tables = []
    for _ in range(batch):
        table = llm.pool.open()
        for start in range(0, tokens, llm.plan.prefill_chunk):
            count = min(llm.plan.prefill_chunk, tokens - start)
            llm.pool.commit(llm.pool.reserve(table, count, True))
        llm.pool.reserve(table, 1)
        tables.append(table)
    widths = [
        max(len(table.pages[b]) for table in tables) or 1
        for b in range(len(llm.plan.index.buckets))
    ]
    pages = [np.zeros((batch, width), np.int32) for width in widths]
    for b, page_table in enumerate(pages):
        for i, table in enumerate(tables):
            page_table[i, : len(table.pages[b])] = table.pages[b]
    ids = np.arange(batch, dtype=np.int32)
    lengths = np.array([table.lengths for table in tables], np.int32)
    starts = np.arange(batch + 1, dtype=np.int32)
    at = np.full(batch, tokens, np.int32)
    return StepPlan(ids, at, starts, np.zeros(1, np.int32), lengths, tuple(pages), ids)


def chunk_step(llm: LLM) -> StepPlan:
    """The first chunk of a prompt, alone."""
    count, table = llm.plan.prefill_chunk, llm.pool.open()
    llm.pool.reserve(table, count, True)
    ids = np.arange(count, dtype=np.int32)
    pages = tuple(
        np.array([table.pages[b] or [0]], np.int32) for b in range(len(table.pages))
    )
    starts, lengths = (
        np.array([0, count], np.int32),
        np.zeros((1, len(pages)), np.int32),
    )
    return StepPlan(ids, ids, starts, ids, lengths, pages, ids[-1:])


def seconds(llm: LLM, step: StepPlan, rounds: int = 5, steps: int = 50) -> float:
    for _ in range(4):
        llm.session.run(step)
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            llm.session.run(step)
        found.append((time.perf_counter() - start) / steps)
    return min(found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--removal-rate", type=float)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for backend, device in (("onnxruntime", "cuda"), ("cuda", None)):
            asked = BuildConfig(
                a.model,
                Path(scratch) / backend,
                a.compression,
                a.removal_rate,
                backend=backend,
                dtype="float16",
                max_batch_size=a.batch + 1,  # room for the prompt
                max_seq_len=a.tokens + 512,
                use_cache=False,
            )
            llm = LLM.load(build(asked), device=device)
            for name, step in (
                (
                    f"decode, {a.batch} x {a.tokens}",
                    decode_step(llm, a.batch, a.tokens),
                ),
                (f"the first {llm.plan.prefill_chunk} of a prompt", chunk_step(llm)),
            ):
                took, rows = seconds(llm, step), len(step.input_ids)
                print(
                    f"{backend:>12} {name:>28}: {1e3 * took:7.3f} ms a step, {rows / took:9.0f} tokens/s"
                )


if __name__ == "__main__":
    main()
