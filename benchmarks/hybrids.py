"""Tokens a second of models whose layers keep states on a GPU, of random weights, through
a build and ``LLM.generate``: decodes of a batch, and prompts.

  python3 -m benchmarks.hybrids [--shapes lfm2-1.2b qwen3.5-4b] [--layers N] [--plain]

``floor``: the time in which a GPU's memory could read weights and states, and write
states, at ``--bandwidth`` bytes a second. ``--plain``: also by torch alone, without
Triton's kernels.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.support.commands import parser_of
from kvlathe.engines.build import BuildConfig, build
from kvlathe.plan.kernel_forms import UNPROVEN
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.torch_cuda import states

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-1.2b": (
        "Lfm2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 12288,
            "block_auto_adjust_ff_dim": True,
            "layer_types": [
                "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv"
                for i in range(16)
            ],
            "vocab_size": 65536,
        },
    ),
    "qwen3.5-4b": (
        "Qwen3_5Text",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 65536,
        },
    ),
    "granite4-h-1b": (
        "GraniteMoeHybrid",
        {
            "hidden_size": 1536,
            "num_hidden_layers": 40,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "intermediate_size": 4096,
            "shared_intermediate_size": 4096,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "position_embedding_type": "nope",
            "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
            "vocab_size": 65536,
        },
    ),
}
"""Class prefix and config of a model as its publisher gives it, with a vocabulary of
65,536."""
BATCHES, FEW, NEW = (1, 16, 64), 8, 72
PROMPTS = ((1, 8192), (16, 512))
LONGEST = 8192 + 128


def write(
    folder: Path, kind: str, settings: dict[str, Any], layers: int | None
) -> None:
    """A checkpoint of random weights."""
    given = dict(settings)
    if layers is not None:
        given["num_hidden_layers"] = layers
        if kinds := given.get("layer_types"):
            given["layer_types"] = kinds[-layers:]
    given |= {"tie_word_embeddings": True, "max_position_embeddings": 32768}
    config = getattr(transformers, f"{kind}Config")(**given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).half()
    model = model.to_empty(device=device)
    draw = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.02, generator=draw)
            else:
                weight.fill_(0.5)
    model.tie_weights()
    model.save_pretrained(folder)


def seconds(llm: LLM, asked: list[list[int]], new: int) -> float:
    start = time.perf_counter()
    llm.generate(asked, max_new_tokens=new, ignore_eos=True)
    return time.perf_counter() - start


def ids(count: int, tokens: int, seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return draw.integers(3, 60000, (count, tokens)).tolist()


def decodes(llm: LLM, weights: int, bandwidth: float) -> Iterator[str]:
    state = llm.plan.model.state_bytes
    for batch in BATCHES:
        seconds(llm, ids(batch, 16, 0), FEW)
        took = min(
            seconds(llm, ids(batch, 16, i), NEW) - seconds(llm, ids(batch, 16, i), FEW)
            for i in range(3)
        )
        a_step = took / (NEW - FEW)
        floor = (weights + 2 * batch * state) / bandwidth
        yield (
            f"{batch:4} sequences: {batch / a_step:9.0f} tokens/s, "
            f"{1e3 * a_step:6.2f} ms a step, floor {1e3 * floor:5.2f} ms"
        )


def prompts(llm: LLM) -> Iterator[str]:
    for count, tokens in PROMPTS:
        seconds(llm, ids(count, tokens, 0), 1)
        took = min(seconds(llm, ids(count, tokens, i), 1) for i in range(2))
        yield (
            f"{count:4} prompts of {tokens}: {count * tokens / took:9.0f} tokens/s, "
            f"{1e3 * took:6.0f} ms"
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="of an H200")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault(UNPROVEN, "1")
    for name in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            measure(
                Path(folder), name, options.layers, options.bandwidth, options.plain
            )


def measure(
    folder: Path, name: str, layers: int | None, bandwidth: float, plain: bool
) -> None:
    start = time.perf_counter()
    write(folder / "model", *SHAPES[name], layers)
    config = BuildConfig(
        folder / "model",
        folder / "engine",
        backend="cuda",
        dtype="float16",
        use_cache=False,
        measure=False,
        max_seq_len=LONGEST,
        max_batch_size=max(BATCHES),
    )
    engine = build(config)
    weights = sum(file.stat().st_size for file in engine.glob("*.data"))
    print(f"{name}: built in {time.perf_counter() - start:.0f} s", flush=True)
    for alone in (False, True) if plain else (False,):
        states.has_kernels.cache_clear()
        if alone:
            setattr(states, "has_kernels", lambda: False)  # noqa: B010
        with LLM.load(engine, gpu_memory_utilization=0.5) as llm:
            how = "by torch alone" if alone else "with Triton's kernels"
            print(
                f"{name} {how}: {weights:,} bytes of weights, "
                f"{llm.plan.model.state_bytes:,} of a state"
            )
            for line in decodes(llm, weights, bandwidth):
                print(line, flush=True)
            for line in prompts(llm):
                print(line, flush=True)


if __name__ == "__main__":
    main()
