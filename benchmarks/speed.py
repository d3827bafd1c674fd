"""Speed of the whole path on this machine: build times, decode against transformers,
and the cost of a larger pool.

    python -m benchmarks.speed --model models/lathe-5m [--context 2048] [--new-tokens
    128] [--rate 0.15]

Both sides run in one process: same weights in float32, same prompt, same number of
threads, as many greedy tokens. Decode speed is the median over ``--repeats``
interleaved rounds of tokens after the first divided by their seconds. One table and one
JSON line; exit code 1 where a bound of AT_MOST or AT_LEAST does not
hold.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.support.options import one_model
from kvlathe.base.console import err, print_table
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig
from kvlathe.export.calibration.calibrate import calibrate
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams

Decode = Callable[[list[int], int], float]
"""(prompt, new tokens) -> decode tokens/s."""

AT_MOST = {
    "calibrate_seconds": 60,
    "export_and_build_seconds": 60,
    "step_ratio_16x_pool": 1.05,
}
AT_LEAST = {
    "decode_none_over_transformers": 1,
    "decode_compressed_over_transformers": 1,
}
"""Bounds by measure."""


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def engine_decode(llm: LLM) -> Decode:
    def run(prompt: list[int], new: int) -> float:
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        return llm.generate([prompt], params)[0].timings.decode_tokens_per_second

    return run


def transformers_decode(model_dir: Path, threads: int) -> Decode:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """Times of the prompt's and each token's arrival."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:  # noqa: ANN401 (transformers' signature)
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    generate: Callable[..., object] = getattr(model, "generate")  # noqa: B009  (a mixin that no type says)

    def run(prompt: list[int], new: int) -> float:
        clock = Clock()
        options: dict[str, Any] = {
            "max_new_tokens": new,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        with torch.inference_mode():
            generate(torch.tensor([prompt]), streamer=clock, **options)
        _, first, *rest = clock.times
        return len(rest) / (rest[-1] - first)

    return run


def step_seconds(llm: LLM, prompt: list[int], new: int) -> float:
    """Seconds of one decode step."""
    return 1 / engine_decode(llm)(prompt, new)


@click.command()
@one_model
@click.option("--context", default=2048, help="prompt tokens")
@click.option("--new-tokens", default=128)
@click.option("--rate", default=0.15, help="removal rate of the compressed engine")
@click.option("--threads", default=2)
@click.option("--repeats", default=3)
def main(
    model: Path, context: int, new_tokens: int, rate: float, threads: int, repeats: int
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(
            model, Path(scratch), context, new_tokens, rate, threads, repeats
        )
    rows = [(name, value, *judged(name, value)) for name, value in result.items()]
    title = f"{model.name}, {context} tokens of context, {threads} threads"
    print_table(title, ("measure", "value", "bound", "ok"), rows, console=err)
    ok = all(row[-1] is not False for row in rows)
    print(json.dumps({**result, "ok": ok}))
    sys.exit(not ok)


def judged(name: str, value: float) -> tuple[str | None, bool | None]:
    """The bound of measure ``name`` in words, and whether ``value`` meets it; None
    where there is none."""
    if name in AT_MOST:
        return f"at most {AT_MOST[name]}", value <= AT_MOST[name]
    if name in AT_LEAST:
        return f"at least {AT_LEAST[name]}", value >= AT_LEAST[name]
    return None, None


def measure(
    model: Path,
    scratch: Path,
    context: int,
    new: int,
    rate: float,
    threads: int,
    repeats: int,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": model.name,
        "context": context,
        "threads": threads,
    }
    checkpoint = Checkpoint(model)
    result["calibrate_seconds"], stats = seconds(
        lambda: calibrate(checkpoint, "random")
    )
    result["calibrate_tokens"] = stats.tokens
    stats.save(scratch / "stats.npz")
    request: dict[str, Any] = {"model": model, "use_cache": False, "workers": threads}
    compressed = BuildConfig(
        **request,
        output_dir=scratch / "compressed",
        compression="fdc",
        removal_rate=rate,
        stats=scratch / "stats.npz",
    )
    result["export_and_build_seconds"], _ = seconds(lambda: build(compressed))
    build(BuildConfig(**request, output_dir=scratch / "none"))

    engines = {
        name: LLM.load(scratch / name, threads=threads)
        for name in ("none", "compressed")
    }
    prompt = (
        np.random.default_rng(0)
        .integers(5, checkpoint.spec.shape.vocab_size, context)
        .tolist()
    )
    sides = {name: engine_decode(llm) for name, llm in engines.items()}
    sides["transformers"] = transformers_decode(model, threads)
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            rounds[name].append(run(prompt, new))
    for name, values in rounds.items():
        result[f"decode_tokens_per_second_{name}"] = statistics.median(values)
    for name in engines:
        base = result["decode_tokens_per_second_transformers"]
        result[f"decode_{name}_over_transformers"] = (
            result[f"decode_tokens_per_second_{name}"] / base
        )
    result.update(
        pool_cost(
            scratch / "compressed", engines["compressed"], prompt, new, threads, repeats
        )
    )
    return result


def pool_cost(
    folder: Path, llm: LLM, prompt: list[int], new: int, threads: int, repeats: int
) -> dict[str, float]:
    """Step time with a pool 16 times as large over that with a pool that just holds the
    sequence."""
    small = 2 * llm.layout.bytes_for(len(prompt) + new)
    pools = {
        scale: LLM.load(folder, cache_bytes=small * scale, threads=threads)
        for scale in (1, 16)
    }
    times: dict[int, list[float]] = {scale: [] for scale in pools}
    for _ in range(repeats):
        for scale, pool in pools.items():
            times[scale].append(step_seconds(pool, prompt, new))
    return {
        "step_seconds": min(times[1]),
        "step_ratio_16x_pool": min(times[16]) / min(times[1]),
    }


if __name__ == "__main__":
    main()
