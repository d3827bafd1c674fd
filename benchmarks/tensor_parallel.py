"""One engine on several GPUs beside the same engine on one: decode, prefill, and bytes by
shard.

  python3 -m benchmarks.tensor_parallel CHECKPOINT --work out --shards 1 2 4

CHECKPOINT: for the 8B shape `python3 -m benchmarks.random_checkpoint out/8b`. The engine
is built once, and loaded by LLM.load for each number of shards in a process of its own.
Decode: ``--batch`` prompts of ``--context`` tokens are computed, then ``--steps`` steps
in which all of them decode are timed, as the engine runs them in serving: pages reserved
and sealed, graphs, tokens sampled greedily on the GPUs. Prefill: one prompt of
``--prompt`` tokens through LLM.generate, to its first token. Times are of the clock: of a
step the mean of ``--steps``, of a prompt the median of five. Needs torch, GPUs and
libkvlathe with CUDA kernels; prints one table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.support.commands import parser_of
from kvlathe.plan.deal import deal
from kvlathe.plan.engine_folder import open_engine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams

WARM, ROUNDS = 3, 5
MOST_NEW = 500
"""Tokens of an answer: some are decoded while other prompts are computed."""


def build(options: argparse.Namespace) -> Path:
    """The engine, unless it is there."""
    folder = options.work / f"engine-{options.compression.replace(':', '-')}"
    if folder.is_dir():
        return folder
    longest = max(options.context, options.prompt) + MOST_NEW + 12
    command = [sys.executable, "-m", "kvlathe", "build"]
    command += ["--model", str(options.checkpoint), "--output-dir", str(folder)]
    command += ["--backend", "cuda", "--dtype", "float16"]
    command += ["--compression", options.compression, *options.more]
    command += ["--max-batch-size", str(options.batch), "--max-seq-len", str(longest)]
    command += ["--max-num-tokens", "8192", "--no-cache"]
    subprocess.run(command, check=True)
    return folder


def decode(llm: LLM, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step with every sequence decoding, after its own prompt."""
    params = SamplingParams(max_new_tokens=MOST_NEW, ignore_eos=True)
    sequences = [
        llm.sequence([3 + (7 * i + j) % 1000 for j in range(options.context)], params)
        for i in range(options.batch)
    ]

    def steps() -> float:
        for sequence in sequences:
            llm.engine.scheduler.waiting.push(sequence)
        while not all(len(s.tokens) > options.context + WARM for s in sequences):
            llm.engine.step()
        before = [len(sequence.tokens) for sequence in sequences]
        started = time.perf_counter()
        for _ in range(options.steps):
            llm.engine.step()
        seconds = time.perf_counter() - started
        for sequence, tokens in zip(sequences, before, strict=True):
            made = len(sequence.tokens) - tokens
            assert made == options.steps, f"{made} tokens: give a larger --cache-size"
        return seconds / options.steps

    step_seconds = llm.thread.call(steps)
    llm.thread.call(lambda: [llm.engine.cancel(s) for s in sequences])
    return {"step_ms": 1e3 * step_seconds, "tokens_s": options.batch / step_seconds}


def prefill(llm: LLM, options: argparse.Namespace) -> dict[str, float]:
    """Seconds until the first token of a prompt."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    seconds: list[float] = []
    for i in range(1 + ROUNDS):
        prompt = [3 + (i + j) % 1000 for j in range(options.prompt)]
        started = time.perf_counter()
        llm.generate([prompt], params)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])
    return {"prefill_ms": 1e3 * median, "prefill_tokens_s": options.prompt / median}


def measure(options: argparse.Namespace, num_shards: int) -> dict[str, Any]:
    """In a process of its own: of one number of shards."""
    engine = build(options)
    opened = open_engine(engine, deep=False)
    dealt = deal(opened.plan, num_shards)
    size = options.cache_size and options.cache_size // num_shards
    with LLM.load(engine, size, verify=False, tensor_parallel_size=num_shards) as llm:
        session: Any = llm.session
        session.warm_up()
        found: dict[str, Any] = {"shards": num_shards}
        found |= prefill(llm, options) | decode(llm, options)
        found["cache_bytes_a_gpu"] = llm.pool.arena_bytes
    filled = dealt.filled(options.context)
    found["kv_bytes_by_rank"] = list(filled)
    found["kv_worst_over_mean"] = max(filled) * num_shards / sum(filled)
    pages = dealt.taken(options.context)
    found["page_bytes_over_mean"] = pages * num_shards / sum(filled)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--work", type=Path, default=Path("out"))
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--compression", default="none")
    parser.add_argument("--more", nargs="*", default=[], help="options of the build")
    parser.add_argument("--cache-size", type=int, help="bytes, of all GPUs together")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options, options.only)))
        return
    build(options)
    rows: list[dict[str, Any]] = []
    for num_shards in options.shards:
        command = [sys.executable, "-m", "benchmarks.tensor_parallel", *sys.argv[1:]]
        command += ["--only", str(num_shards)]
        done = subprocess.run(
            command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    for row in rows:
        for name in ("step_ms", "prefill_ms"):
            row[f"{name}_speedup"] = rows[0][name] / row[name]
    print(
        f"{'GPUs':>5}{'decode ms':>11}{'x':>6}{'prefill ms':>12}{'x':>6}  KV GB by shard"
    )
    for row in rows:
        sizes = " ".join(f"{size / 1e9:.3f}" for size in row["kv_bytes_by_rank"])
        print(
            f"{row['shards']:>5}{row['step_ms']:>11.2f}{row['step_ms_speedup']:>6.2f}"
            f"{row['prefill_ms']:>12.1f}{row['prefill_ms_speedup']:>6.2f}  {sizes}"
        )
    named = {name: getattr(options, name) for name in ("batch", "context", "prompt")}
    print(json.dumps({"compression": options.compression, **named, "rows": rows}))


if __name__ == "__main__":
    main()
