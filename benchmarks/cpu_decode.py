"""Decode and prefill on the CPU: our engines, natively and on the ONNX function,
transformers, ONNX Runtime GenAI, llama.cpp. Beside them what no runner passes: reading
the bytes that a token needs.

  kvlathe build --model M --output-dir out/none kvlathe build --model M --output-dir
  out/fdc --compression fdc --removal-rate 0.15 python -m
  onnxruntime_genai.models.builder -i M -o out/genai -p fp32 -e cpu python
  benchmarks/cpu_decode.py native:out/none native:out/fdc function:out/none
  transformers:M genai:out/genai reads:out/none reads:out/fdc

  kvlathe build --model M.gguf --output-dir out/int4 --weights int4 python
  benchmarks/cpu_decode.py native:out/int4 llama:M.gguf llama-q8_0:M.gguf --contexts 512
  2048 8192

One prompt of real text, greedy. Each runner is a process of its own: nothing is shared
but the machine. A round measures every runner once, rounds are repeated, the best of
each cell is kept: other load only slows. One thread is timed by its processor time.
Rows are printed as they are measured, and all of them again at the end.
Decode tokens/s counts all that happens between two tokens; prefill is the time to the
first token.

``llama``: llama.cpp by its Python package, with a cache in 16 bits. It has two rows,
without flash attention and (``llama-flash``) with it; the faster one is the one to
compare with. ``llama-q8_0`` is its cache in 8 bits, which needs flash attention. The
package may lie in a folder of its own, which PYTHONPATH names. It gets the same token
ids, by llama_decode.

``reads``: an engine's weights and the pages of the context are summed up by torch, and
nothing else is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support.commands import DATA, ROOT, parser_of

Runner = Callable[[list[int], int], tuple[float, float]]
"""(prompt, new tokens) -> (prefill seconds, decode tokens a second)."""
Clock = Callable[[], float]


def engine(path: Path, threads: int) -> Runner:
    from kvlathe.runtime.llm import LLM
    from kvlathe.runtime.requests.request import Delta
    from kvlathe.runtime.text.sampling_params import SamplingParams

    llm = LLM.load(path, threads=threads, verify=False)

    def run(prompt: list[int], new: int) -> tuple[float, float]:
        inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        params = SamplingParams(max_new_tokens=new + 1, ignore_eos=True)
        sequence = llm.sequence(prompt, params)

        def prefill() -> None:
            llm.thread.submit([sequence], inbox.put)
            step()

        def step() -> None:
            if error := inbox.get().error:
                raise error

        return timed(prefill, step, new, clock_of(threads))

    return run


def clock_of(threads: int) -> Clock:
    """One thread is timed by its processor time: the work of others does not count."""
    return time.process_time if threads == 1 else time.perf_counter


def timed(
    prefill: Callable[[], None], step: Callable[[], None], new: int, clock: Clock
) -> tuple[float, float]:
    start = clock()
    prefill()
    first = clock()
    for _ in range(new):
        step()
    return first - start, new / (clock() - first)


def transformers(path: Path, threads: int) -> Runner:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True
    )

    @torch.inference_mode()
    def run(prompt: list[int], new: int) -> tuple[float, float]:
        cache, ids = DynamicCache(config=model.config), torch.tensor([prompt])

        def step() -> None:
            nonlocal ids
            logits = model(
                ids, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
            ids = logits[:, -1:].argmax(-1)

        return timed(step, step, new, clock_of(threads))

    return run


def genai(path: Path, threads: int) -> Runner:
    import onnxruntime_genai as og

    config = og.Config(str(path))
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = og.Model(config)

    def run(prompt: list[int], new: int) -> tuple[float, float]:
        params, length = og.GeneratorParams(model), len(prompt) + new + 1
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = og.Generator(model, params)

        def prefill() -> None:
            generator.append_tokens(prompt)
            generator.generate_next_token()

        return timed(prefill, generator.generate_next_token, new, clock_of(threads))

    return run


def llama(path: Path, threads: int, flash: bool = False, cache: str = "F16") -> Runner:
    import llama_cpp
    import numpy as np

    cells = getattr(llama_cpp, f"GGML_TYPE_{cache}")

    def run(prompt: list[int], new: int) -> tuple[float, float]:
        model = llama_cpp.Llama(
            str(path),
            n_ctx=len(prompt) + new + 2,
            n_batch=2048,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash,
            type_k=cells,
            type_v=cells,
            verbose=False,
        )
        size = model.n_vocab()

        def step(ids: list[int]) -> list[int]:
            given = (llama_cpp.llama_token * len(ids))(*ids)
            batch = llama_cpp.llama_batch_get_one(given, len(ids))
            if llama_cpp.llama_decode(model.ctx, batch):
                raise RuntimeError(f"llama.cpp did not take {len(ids)} tokens")
            logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
            return [int(np.ctypeslib.as_array(logits, (size,)).argmax())]

        def prefill() -> None:
            nonlocal last
            for at in range(0, len(prompt), model.n_batch):
                last = step(prompt[at : at + model.n_batch])

        def decode() -> None:
            nonlocal last
            last = step(last)

        last = step(prompt[:1])  # reads the weights once
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(model.ctx), True)
        result = timed(prefill, decode, new, clock_of(threads))
        model.close()
        return result

    return run


def reads(path: Path, threads: int) -> Runner:
    import torch

    from kvlathe.plan.engine_folder import open_engine
    from kvlathe.plan.layout import CacheLayout

    torch.set_num_threads(threads)
    layout = CacheLayout(open_engine(path).plan)
    weights = torch.ones(weight_bytes(path) // 4)

    def run(prompt: list[int], new: int) -> tuple[float, float]:
        pages = torch.ones(layout.bytes_for(len(prompt)) // 4)

        def step() -> None:
            weights.sum()
            pages.sum()

        return timed(step, step, new, clock_of(threads))

    return run


def weight_bytes(path: Path) -> int:
    """Bytes of the matrices that each token is multiplied with."""
    import onnx

    [file] = path.glob("*.onnx")
    graph = onnx.load(file, load_external_data=False).graph
    sizes: dict[str, int] = {}
    for held in graph.initializer:
        width = onnx.helper.tensor_dtype_to_np_dtype(held.data_type).itemsize
        sizes[held.name] = math.prod(held.dims) * width
    products = [node for node in graph.node if node.op_type in PRODUCTS]
    read = {name for node in products for name in node.input}
    return sum(sizes.get(name, 0) for name in read)


PRODUCTS = ("MatMul", "Gemm")
RUNNERS: dict[str, Callable[[Path, int], Runner]] = {
    "native": engine,
    "function": engine,
    "transformers": transformers,
    "genai": genai,
    "llama": llama,
    "llama-flash": partial(llama, flash=True),
    "llama-q8_0": partial(llama, flash=True, cache="Q8_0"),
    "reads": reads,
}
ALSO = {"llama": "llama-flash"}
"""Kinds that are never measured without another one beside them."""


def child(kind: str, path: Path, threads: int) -> None:
    """Answer (prompt, new tokens) lines with measurement lines until stdin ends."""
    with contextlib.redirect_stdout(sys.stderr):
        run = RUNNERS[kind](path, threads)
    for line in sys.stdin:
        prefill, decode = run(*json.loads(line))
        print(
            json.dumps(
                (
                    prefill,
                    decode,
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                )
            ),
            flush=True,
        )


@contextlib.contextmanager
def started(runner: str, threads: int) -> Generator[subprocess.Popen[str]]:
    kind, path = runner.split(":", 1)
    command = [
        sys.executable,
        "-m",
        "benchmarks.cpu_decode",
        "--child",
        kind,
        path,
        "--threads",
        str(threads),
    ]
    switch = {"KVLATHE_NATIVE": "0"} if kind == "function" else {}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        **switch,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": str(threads),
    }
    with subprocess.Popen(
        command, text=True, stdin=-1, stdout=-1, env=environment
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(
    process: subprocess.Popen[str], prompt: list[int], new: int
) -> tuple[float, float, float]:
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps((prompt, new)), file=process.stdin, flush=True)
    return tuple(json.loads(process.stdout.readline()))


def real_text(tokenizer: Path, count: int) -> list[int]:
    from kvlathe.runtime.text.tokenizer import Tokenizer

    lines = (DATA / "eval_text.jsonl").read_text("utf-8").splitlines()
    return Tokenizer(tokenizer).encode(
        " ".join(json.loads(line)["text"] for line in lines[:100])
    )[:count]


def show(runner: str, context: int, prefill: float, decode: float, peak: float) -> None:
    values = f"{decode:>16.1f} {prefill:>10.2f} {peak:>8.0f}"
    print(f"{runner:<44} {context:>8} {values}", flush=True)


def with_others(runners: list[str]) -> list[str]:
    """The runners, each followed by the kind that belongs beside it."""
    pairs = [runner.split(":", 1) for runner in runners]
    both = [(k, p) for kind, p in pairs for k in (kind, ALSO.get(kind)) if k]
    return list(dict.fromkeys(f"{kind}:{path}" for kind, path in both))


def measure(
    runners: list[str], prompts: dict[int, list[int]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One record a runner and context: the best of all rounds."""
    best = {
        (r, n): {"prefill_s": float("inf"), "decode_tps": 0.0, "peak_mb": 0.0}
        for r in runners
        for n in prompts
    }
    for _ in range(args.rounds):
        for runner in runners:
            with started(runner, args.threads) as process:
                ask(process, prompts[min(prompts)][:100], 4)  # warm
                for context, prompt in prompts.items():
                    prefill, decode, peak = ask(process, prompt, args.tokens)
                    cell = best[runner, context]
                    cell["prefill_s"] = min(cell["prefill_s"], prefill)
                    cell["decode_tps"] = max(cell["decode_tps"], decode)
                    cell["peak_mb"] = max(cell["peak_mb"], peak)
                    show(runner, context, prefill, decode, peak)
    return [
        {"runner": runner, "context": context, **cell}
        for (runner, context), cell in best.items()
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "runners", nargs="+", help="KIND:FOLDER, KIND one of " + ", ".join(RUNNERS)
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 3840])
    parser.add_argument(
        "--tokens", type=int, default=64, help="decoded at each context"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.runners[0], Path(args.runners[1]), args.threads)
        return
    folder = Path(args.runners[0].split(":", 1)[1])
    text = real_text(folder, max(args.contexts))
    prompts = {n: text[:n] for n in sorted(args.contexts)}
    print(
        f"{'runner':<44} {'context':>8} {'decode tokens/s':>16} {'prefill s':>10} {'peak MB':>8}"
    )
    records = measure(with_others(args.runners), prompts, args)
    print(f"\nThe best of {args.rounds} rounds:")
    for record in records:
        show(*record.values())
    print(
        json.dumps(
            {
                "bench": "cpu_decode",
                "threads": args.threads,
                "tokens": args.tokens,
                "results": records,
            }
        )
    )


if __name__ == "__main__":
    main()
