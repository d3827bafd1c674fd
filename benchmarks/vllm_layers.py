"""Seconds in which the vLLM plugin makes the layers of a model of the 8B shape, in Python
alone: nothing is launched, and no GPU is needed.

    PYTHONPATH=.:integrations/vllm python -m benchmarks.vllm_layers 8 16 32
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.lives import SEAL
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.library import find
from kvlathe_vllm.cuda import CudaLayer
from kvlathe_vllm.hosted import Hosted
from kvlathe_vllm.layer import Most
from tests.support.block_caches import block_cache
from tests.support.host_device import HostLibrary

PAGE, BLOCKS, HEADS, DIMS = 64, 4, 8, 128
MOST = Most(64, 8192, 8192)
WORKSPACE = 1 << 20


class SilentLibrary(HostLibrary):
    """Launches nothing."""

    def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  (structures)
        if name == "layer_create":
            super().call(name, *given)
        if name == "cuda_workspace_bytes":
            given[-1]._obj.value = WORKSPACE


def engine_of(layers: int) -> Hosted:
    """4 bits, and 8 KV heads of 128 dimensions in each layer."""
    shape = ModelShape(layers, 4 * HEADS, HEADS, DIMS, 64, 100, 32768)
    of_layers = range(layers * HEADS)
    lanes = tuple(
        Lane(i // HEADS, i % HEADS, DIMS, DIMS, DIMS, "none") for i in of_layers
    )
    every = tuple(of_layers)
    groups = (Group(every, Tier(16, 16), (Tier(4, 4),), SEAL),)
    plan = CompressionPlan(shape, lanes, groups, PAGE, PAGE)
    return Hosted(Path("engine"), plan, {})


def seconds(layers: int) -> float:
    """Seconds of all layers together."""
    native = find().native
    if native is None:
        sys.exit("no native library: kvlathe native")
    engine, library = engine_of(layers), SilentLibrary(native)
    start = time.perf_counter()
    for layer in range(layers):
        cache = block_cache(engine.blocks[layer], BLOCKS)
        CudaLayer(engine, layer, cache, MOST, 1.0, torch.float16, library)
    return time.perf_counter() - start


def main() -> None:
    counts = [int(x) for x in sys.argv[1:]] or [32]
    found = {count: round(seconds(count), 2) for count in counts}
    print("| layers | seconds |\n|---|---|")
    for count, time_taken in found.items():
        print(f"| {count} | {time_taken} |")
    print(json.dumps({"seconds": found}))


if __name__ == "__main__":
    main()
