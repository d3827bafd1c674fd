"""Peak memory of building a synthetic checkpoint of 1 B parameters (bf16, random
weights): at most its size + 2 GB.

    python tests/bench/build_memory.py [--folder DIR] [--compression fdc]

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
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

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
import json, os, sys
from pathlib import Path
from kvlathe.engines.build import BuildRequest, build
fields = json.loads(sys.argv[1])
build(BuildRequest(**{**fields, "model": Path(fields["model"]), "output_dir": Path(fields["output_dir"])}))
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


def write_checkpoint(folder: Path) -> int:
    """Write the synthetic checkpoint; returns the bytes of its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    weight_map, size = {}, 0
    for shard, shapes in tensors():
        file = f"{shard}.safetensors"
        save_file(
            {name: random_weight(shape) for name, shape in shapes.items()},
            folder / file,
            {"format": "pt"},
        )
        weight_map |= dict.fromkeys(shapes, file)
        size += (folder / file).stat().st_size
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return size


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


def measure(model: Path, output: Path, options: dict[str, object]) -> tuple[int, float]:
    """(peak resident bytes, seconds) of one build in a child process."""
    request = {
        "model": str(model),
        "output_dir": str(output),
        "use_cache": False,
        **options,
    }
    started = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", BUILD, json.dumps(request)])
    watch = PeakWatch(child.pid)
    watch.start()
    if child.wait() != 0:
        sys.exit("the build failed")
    return watch.peak, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to work (needs about 7 GB)"
    )
    parser.add_argument("--compression", default="fdc")
    parser.add_argument("--compression-ratio", type=float, default=0.25)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        size = write_checkpoint(Path(work) / "model")
        options: dict[str, object] = {
            "compression": arguments.compression,
            "dtype": arguments.dtype,
        }
        if arguments.compression != "none":
            options["compression_ratio"] = arguments.compression_ratio
        peak, seconds = measure(Path(work) / "model", Path(work) / "engine", options)
        engine = sum(path.stat().st_size for path in (Path(work) / "engine").iterdir())
    rows = [
        ("checkpoint", size),
        ("engine", engine),
        ("peak resident", peak),
        ("allowed", size + ALLOWANCE),
    ]
    print_table(
        f"Building 1 B parameters, {seconds:.0f} s",
        ("", "bytes"),
        [(n, human_bytes(b)) for n, b in rows],
    )
    result = {
        "bench": "build_memory",
        "checkpoint_bytes": size,
        "engine_bytes": engine,
        "peak_bytes": peak,
    }
    print(
        json.dumps(
            result | {"seconds": round(seconds, 1), "ok": peak <= size + ALLOWANCE}
        )
    )
    sys.exit(peak > size + ALLOWANCE)


if __name__ == "__main__":
    main()
