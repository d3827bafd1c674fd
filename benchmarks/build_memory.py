"""Seconds and memory of a build, phase by phase. Of a synthetic checkpoint of 1 B
parameters (bf16, random weights) peak memory may be its size + 2 GB; of a given one
there is no bound.

    python -m benchmarks.build_memory [--folder DIR] [--compression fdc]
    python -m benchmarks.build_memory --model out/8b --compression fdc+hack:bits=8 \\
        --backend cuda --dtype float16 --gpu-memory 12

The build runs in a child process; its resident set, and that of the processes it
starts, is sampled every 20 ms. Mapped files count as far as they are resident, so the
checkpoint itself is in the number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from benchmarks.support.commands import parser_of
from kvlathe.base.console import human_bytes, print_table

GB = 1_000_000_000
ALLOWANCE = 2 * GB
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}

BUILD = """
import dataclasses, json, sys
from pathlib import Path
from kvlathe.base import console
from kvlathe.engines.build import BuildConfig, build
from kvlathe.engines.phases import recorded
console.setup("info")
fields, gigabytes, result = json.loads(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
if gigabytes:
    import torch
    whole = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / whole)
with recorded() as phases:
    build(BuildConfig(**fields))
result.write_text(json.dumps([dataclasses.asdict(phase) for phase in phases]))
"""


def tensors() -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """(shard name, {tensor: shape}): one shard a layer, so that writing the checkpoint
    needs little memory."""
    d, ff, kv, v = (
        CONFIG[k]
        for k in (
            "hidden_size",
            "intermediate_size",
            "num_key_value_heads",
            "vocab_size",
        )
    )
    kv *= CONFIG["head_dim"]
    yield (
        "outside",
        {
            "model.embed_tokens.weight": (v, d),
            "lm_head.weight": (v, d),
            "model.norm.weight": (d,),
        },
    )
    for i in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield (
            f"layer{i}",
            {
                **{
                    f"{at}self_attn.{n}_proj.weight": (rows, d)
                    for n, rows in (("q", d), ("k", kv), ("v", kv), ("o", d))
                },
                **{f"{at}mlp.{n}_proj.weight": (ff, d) for n in ("gate", "up")},
                f"{at}mlp.down_proj.weight": (d, ff),
                f"{at}input_layernorm.weight": (d,),
                f"{at}post_attention_layernorm.weight": (d,),
            },
        )


def write_checkpoint(folder: Path) -> None:
    """Write the synthetic checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    weight_map = {}
    for shard, shapes in tensors():
        file = f"{shard}.safetensors"
        save_file(
            {name: random_weight(shape) for name, shape in shapes.items()},
            folder / file,
            {"format": "pt"},
        )
        weight_map |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def random_weight(shape: tuple[int, ...]) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)


def resident(pid: int) -> int:
    """Resident bytes of a process and all its descendants."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(
        resident(int(child)) for child in children
    )


class PeakWatch(threading.Thread):
    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak = pid, 0

    def run(self) -> None:
        while now := resident(self.pid):
            self.peak = max(self.peak, now)
            time.sleep(0.02)


@dataclass(frozen=True)
class Measured:
    """One build: ``peak`` resident bytes, ``seconds`` of its process, and its phases."""

    peak: int
    seconds: float
    phases: list[dict[str, Any]]


def measure(options: dict[str, object], gpu_gigabytes: float, work: Path) -> Measured:
    """One build in a child process. ``gpu_gigabytes``: what torch may take of the GPU (0:
    all)."""
    request = json.dumps({"use_cache": False, **options})
    result = work / "phases.json"
    words = [sys.executable, "-c", BUILD, request, str(gpu_gigabytes), str(result)]
    started = time.monotonic()
    child = subprocess.Popen(words)
    watch = PeakWatch(child.pid)
    watch.start()
    if child.wait() != 0:
        sys.exit("the build failed")
    seconds = time.monotonic() - started
    return Measured(watch.peak, seconds, json.loads(result.read_text()))


def show(measured: Measured, sizes: dict[str, int]) -> None:
    rows = []
    for phase in measured.phases:
        on_gpu = phase["gpu_bytes"] and human_bytes(phase["gpu_bytes"])
        host = human_bytes(phase["host_bytes"])
        rows.append((phase["name"], round(phase["seconds"], 1), host, on_gpu or None))
    columns = ("phase", "seconds", "most memory so far", "of the GPU")
    print_table("Phases", columns, rows)
    counted = [(name, human_bytes(size)) for name, size in sizes.items()]
    print_table(f"The build, {measured.seconds:.1f} s", ("", "bytes"), counted)


def options_of(arguments: argparse.Namespace) -> dict[str, object]:
    """The request's fields, but for its folders."""
    options: dict[str, object] = {
        "compression": arguments.compression,
        "backend": arguments.backend,
        "dtype": arguments.dtype,
        "device": arguments.device,
    }
    ratio = arguments.compression_ratio
    if ratio is None and arguments.model is None:
        ratio = 0.25
    if arguments.compression != "none":
        options["compression_ratio"] = ratio
    return options


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="where to work (needs about 7 GB)")
    parser.add_argument("--model", type=Path, help="a checkpoint, not a synthetic one")
    parser.add_argument("--compression", default="fdc")
    parser.add_argument("--compression-ratio", type=float)
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--gpu-memory", type=float, default=0.0, metavar="GB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        work = Path(folder)
        model = arguments.model or work / "model"
        if arguments.model is None:
            write_checkpoint(model)
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        folders = {"model": str(model), "output_dir": str(work / "engine")}
        options = options_of(arguments) | folders
        measured = measure(options, arguments.gpu_memory, work)
        engine = sum(path.stat().st_size for path in (work / "engine").iterdir())
    allowed = size + ALLOWANCE
    sizes = {"checkpoint": size, "engine": engine, "peak resident": measured.peak}
    show(measured, sizes | {"allowed": allowed})
    ok = measured.peak <= allowed
    result = {
        "bench": "build_memory",
        "checkpoint_bytes": size,
        "engine_bytes": engine,
        "peak_bytes": measured.peak,
        "seconds": round(measured.seconds, 1),
        "phases": measured.phases,
        "ok": ok,
    }
    print(json.dumps(result))
    sys.exit(arguments.model is None and not ok)


if __name__ == "__main__":
    main()
