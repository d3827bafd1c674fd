"""The engine that vLLM hosts: a folder of ``kvlathe build --backend vllm``, opened once
a process. No vLLM and no torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.engine_folder import open_engine
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layer_block import LayerBlock, bare, newest
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import HEADS_FILE
from kvlathe.plan.plan import CompressionPlan

VARIABLE = "KVLATHE_VLLM"
"""Names the folder. ``--additional-config '{"kvlathe": FOLDER}'`` does, too."""
OPTION = "kvlathe"
Float32 = npt.NDArray[np.float32]
Matrices = Mapping[str, Float32]
"""Matrices of one head, by the names of export/folding/host_heads.py; empty: it stays
as it is."""


@dataclass(frozen=True)
class Hosted:
    """``plan``: as pages of vLLM hold it, with q and k whole and after RoPE; of a shard
    (dealt.py), what that shard keeps. ``heads``: of (layer, KV head). ``least``: bytes
    of a token that blocks of each layer have at least, as other shards need them."""

    folder: Path
    plan: CompressionPlan
    heads: Mapping[tuple[int, int], Matrices]
    least: tuple[int, ...] = ()

    @cached_property
    def blocks(self) -> tuple[LayerBlock, ...]:
        """The block of each layer."""
        layout = CacheLayout(self.plan)
        layers = range(self.plan.model.layers)
        return tuple(LayerBlock(layout, layer) for layer in layers)

    def token_bytes(self, layer: int) -> int:
        """Bytes of a token in the blocks of a layer."""
        own = self.blocks[layer].token_bytes
        return max(own, self.least[layer]) if self.least else own

    def window(self, layer: int, of_model: int | None) -> int | None:
        """The newest tokens that blocks of a layer hold, the one that is computed
        included; None: all. ``of_model``: those that the layer's queries see in the
        model itself. Raises KvlatheError where the plan shows them more."""
        kept = newest(self.plan, layer)
        if of_model is not None and (kept is None or kept > of_model):
            raise KvlatheError(
                f"{self.folder} is no plan for this model",
                f"layer {layer} sees {of_model} tokens in the model, and in the plan "
                f"{kept or 'all'}",
                "build one with --backend vllm from the checkpoint that vLLM serves",
            )
        return kept

    @property
    def seals(self) -> bool:
        return self.plan.index.seals

    def matrices(self, lane: Lane) -> Matrices:
        return self.heads.get((lane.layer, lane.head), {})

    def check_model(self, shape: tuple[int, int, int, int], served: str) -> None:
        """``shape``: layers, query heads, KV heads and dimensions of the model
        ``served``. Raises KvlatheError where the plan is for another."""
        own = _shape_of(self.plan.model)
        if shape != own:
            raise KvlatheError(
                f"{self.folder} is no plan for {served}",
                f"it is for (layers, query heads, KV heads, dimensions) {own}, and the "
                f"model has {shape}",
                "build one with --backend vllm from the checkpoint that vLLM serves",
            )


def _shape_of(model: ModelShape) -> tuple[int, int, int, int]:
    return model.layers, model.query_heads, model.kv_heads, model.head_dim


def open_hosted(folder: Path) -> Hosted:
    """Raises KvlatheError for a folder that was built for something else, or
    changed."""
    engine = open_engine(folder)
    if engine.manifest.backend != "vllm":
        raise KvlatheError(
            f"the engine {folder} was built for {engine.manifest.backend}",
            "vLLM runs plans and bases beside its own checkpoint",
            "build it with --backend vllm",
        )
    heads = _read_heads(folder / HEADS_FILE)
    width = engine.plan.model.kv_heads
    projected = [
        layer * width + head for (layer, head), own in heads.items() if "q" in own
    ]
    return Hosted(folder, bare(engine.plan, projected), heads)


def _read_heads(path: Path) -> dict[tuple[int, int], Matrices]:
    heads: dict[tuple[int, int], dict[str, Float32]] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            layer, head, matrix = name.split(".")
            at = (int(layer), int(head))
            if at not in heads:
                heads[at] = {}
            heads[at][matrix] = arrays[name]
    return dict(heads)


_opened: dict[Path, Hosted] = {}


def named(options: Mapping[str, object] | None = None) -> Path | None:
    """The folder that ``options`` (vLLM's additional config) or the environment
    name."""
    given = (options or {}).get(OPTION) or os.environ.get(VARIABLE)
    return Path(str(given)) if given else None


def hosted(options: Mapping[str, object] | None = None) -> Hosted:
    """The engine of this process: the one that was opened, where none is named here.
    Raises KvlatheError where nothing names one."""
    folder = named(options)
    if folder is None and _opened:
        folder = next(iter(_opened))
    if folder is None:
        raise KvlatheError(
            "vLLM was not told which engine to host",
            f"neither {VARIABLE} nor --additional-config names one",
            f"start it with {VARIABLE}=FOLDER of kvlathe build --backend vllm",
        )
    if folder not in _opened:
        _opened[folder] = open_hosted(folder)
    return _opened[folder]
