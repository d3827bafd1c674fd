"""AdapterMaps: what an engine must know to take LoRA adapters at run time: which of its
maps each module of the model is in, and how that map was folded.

A module's product is x A^T B^T. Its map in an engine has outputs in another order, times
a factor; where bases were folded into it, those of each lane multiply the outputs of q,
k and v, or the inputs of o. So the same is done to B, or to A, when an adapter is
loaded, and a cache stays in its bases. Constants that centring took from V come back
behind W_O, so that an adapter of W_O has a constant too (``shift``).

Bases of K and Q that RoPE stands before are applied after it: they are in no weight, and
so in no adapter.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan import json_fields
from kvlathe.plan.json_fields import Count, Positive

ADAPTERS_FILE = "adapters.json"
FOLDS_FILE = "adapters.npz"
ORDER = ".order"
Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


def adapter_graph(name: str) -> str:
    """The graph that takes adapters, beside the graph ``name`` that takes none."""
    return f"{Path(name).stem}.adapters.onnx"


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one map of an engine: x ``a`` ``b``, and where inputs were
    centred ``shift`` ``b``. a [in, r], b [r, out], shift [r]."""

    a: Float32
    b: Float32
    shift: Float32 | None = None


@dataclass(frozen=True, slots=True)
class AdapterMap:
    """A map of an engine, such as ``layers.0.q``, and the ``modules`` of the model that
    it is in, by all their names, with their sizes there.

    ``side``: where bases of lanes multiply, if they do. ``kv_heads``: of the model;
    ``lanes``: of each kept one, its head and those that it stands for. ``shifts``:
    whether its inputs were centred.
    """

    name: str
    modules: tuple[str, ...]
    inputs: Positive
    outputs: Positive
    factor: float
    side: Literal["none", "outputs", "inputs"] = "none"
    kv_heads: Count = 0
    lanes: tuple[tuple[Count, ...], ...] = ()
    shifts: bool = False


@dataclass(frozen=True, slots=True)
class _Maps:
    maps: tuple[AdapterMap, ...]


@dataclass(frozen=True)
class AdapterMaps:
    """``orders``: by map, the module's outputs in the map's order, where that is
    another. ``folds``: ``NAME.i`` and ``NAME.shift.i``, the matrix and the constant of
    lane i."""

    maps: tuple[AdapterMap, ...]
    orders: Mapping[str, Int32]
    folds: Mapping[str, Float32]

    def write(self, folder: Path) -> None:
        """Into an engine's folder."""
        text = json.dumps(dataclasses.asdict(_Maps(self.maps)), indent=1)
        (folder / ADAPTERS_FILE).write_text(text, "utf-8")
        with (folder / FOLDS_FILE).open("wb") as file:
            named = {f"{name}{ORDER}": order for name, order in self.orders.items()}
            np.savez(file, allow_pickle=False, **named, **self.folds)

    @classmethod
    def read(cls, folder: Path) -> AdapterMaps:
        """Raises KvlatheError where the files cannot be read."""
        try:
            said = json_fields.parse((folder / ADAPTERS_FILE).read_text("utf-8"))
            found = json_fields.read(_Maps, said)
            with np.load(folder / FOLDS_FILE, allow_pickle=False) as file:
                orders: dict[str, Int32] = {}
                folds: dict[str, Float32] = {}
                for name in file.files:
                    if name.endswith(ORDER):
                        orders[name.removesuffix(ORDER)] = file[name].astype(np.int32)
                    else:
                        folds[name] = file[name].astype(np.float32)
                return cls(found.maps, orders, folds)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise KvlatheError(
                f"{folder / ADAPTERS_FILE} cannot be read",
                str(error),
                "build the engine again",
            ) from error

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of every module that adapters may change."""
        return {
            module: (one.inputs, one.outputs)
            for one in self.maps
            for module in one.modules
        }

    def of(self, module: str) -> list[AdapterMap]:
        """The maps that a module is in: three, where it is q, k and v together."""
        return [one for one in self.maps if module in one.modules]

    def folded(self, own: AdapterMap, a: Float32, b: Float32, scale: float) -> LowRank:
        """What ``scale`` B @ A of a module, a [r, in] and b [out, r], adds to a map."""
        order = self.orders.get(own.name)
        outputs = (b if order is None else b[order]).T * np.float32(scale * own.factor)
        inputs = a.T
        shift: Float32 | None = None
        if own.side == "outputs":
            outputs = self._folded_outputs(own, outputs)
        if own.side == "inputs":
            inputs, shift = self._folded_inputs(own, inputs)
        whole = np.ascontiguousarray
        return LowRank(whole(inputs), whole(outputs), shift)

    def _folded_outputs(self, own: AdapterMap, outputs: Float32) -> Float32:
        """[r, all heads], each kept lane's times its matrix [d, n]."""
        rank = len(outputs)
        blocks: list[Float32] = []
        for i, (head, *_) in enumerate(own.lanes):
            matrix = self.folds[f"{own.name}.{i}"]
            heads = outputs.reshape(rank, own.kv_heads, -1, len(matrix))
            blocks.append((heads[:, head] @ matrix).reshape(rank, -1))
        return np.concatenate(blocks, 1)

    def _folded_inputs(
        self, own: AdapterMap, inputs: Float32
    ) -> tuple[Float32, Float32 | None]:
        """[all heads, r]: each kept lane's matrix [n, d] times its rows, those of lanes
        that it fills added; and what its constants give, [r]."""
        rank = inputs.shape[1]
        shift = np.zeros(rank, np.float32)
        blocks: list[Float32] = []
        for i, heads in enumerate(own.lanes):
            matrix = self.folds[f"{own.name}.{i}"]
            by_head = inputs.reshape(own.kv_heads, -1, matrix.shape[1], rank)
            rows = by_head[list(heads)].sum(0)
            blocks.append((matrix @ rows).reshape(-1, rank))
            if own.shifts:
                shift += self.folds[f"{own.name}.shift.{i}"] @ rows.sum(0)
        return np.concatenate(blocks), shift if own.shifts else None
