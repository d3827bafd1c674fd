"""AdapterFeeds: what a graph that takes adapters is fed of those in a step
(export/onnx/adapters.py says what it makes of it)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from weakref import ref

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kvlathe.plan.adapter_maps import LowRank
from kvlathe.runtime.sessions.adapters import LoadedAdapter, distinct, row_numbers
from kvlathe.runtime.sessions.protocols import StepPlan

MARK = ".adapters."
KEPT = 4
"""Mixes of adapters whose matrices stay side by side in memory."""
Feeds = dict[str, ort.OrtValue]
Mix = tuple[ref[LoadedAdapter], ...]
"""The adapters of a step. One that is unloaded stays while an answer still has it."""


class AdapterFeeds:
    """``shapes``: of the graph's inputs; ``types``: theirs, as ONNX Runtime names
    them."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int | str]], types: Mapping[str, str]
    ) -> None:
        self._shapes = {name: x for name, x in shapes.items() if MARK in name}
        own = {types[name] for name in self._shapes}
        self._half = "tensor(float16)" in own
        self._kept: OrderedDict[Mix, Feeds] = OrderedDict()

    def of(self, step: StepPlan) -> Feeds:
        """Everything that the graph is fed beside what it takes without adapters."""
        assert step.adapters is not None
        there = distinct(step.adapters)
        rows = row_numbers(step.adapters, step.cu_seqlens_q, len(step.input_ids))
        mix = tuple(map(ref, there))
        self._forget(None)
        if mix not in self._kept:
            self._kept[mix] = self._side_by_side(there)
        self._kept.move_to_end(mix)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return {"adapters": _value(rows)} | self._kept[mix]

    def forget(self, adapter: LoadedAdapter) -> None:
        """Keep nothing of an adapter, but what an answer that still has it brings back
        until it ends."""
        self._forget(adapter)

    def _forget(self, adapter: LoadedAdapter | None) -> None:
        """None: the adapters that nobody has any more."""
        for mix in list(self._kept):
            if adapter in [one() for one in mix]:
                del self._kept[mix]

    def _side_by_side(self, there: tuple[LoadedAdapter, ...]) -> Feeds:
        arrays: dict[str, npt.NDArray[np.generic]] = {}
        for name in [x for x in self._shapes if x.endswith(f"{MARK}a")]:
            of_map = name.removesuffix(f"{MARK}a")
            parts = [(x.number, x.maps[of_map]) for x in there if of_map in x.maps]
            arrays |= self._map(of_map, parts)
        return {
            name: _value(self._typed(array))
            for name, array in arrays.items()
            if name in self._shapes
        }

    def _map(
        self, of_map: str, parts: list[tuple[int, LowRank]]
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Inputs of one map, of the adapters that change it; they have no columns where
        none does."""
        at = f"{of_map}{MARK}"
        inputs, outputs = self._shapes[f"{at}a"][0], self._shapes[f"{at}b"][1]
        a = [np.zeros((int(inputs), 0), np.float32), *(x.a for _, x in parts)]
        b = [np.zeros((0, int(outputs)), np.float32), *(x.b for _, x in parts)]
        ranks = [x.a.shape[1] for _, x in parts]
        zeros = [np.zeros(rank, np.float32) for rank in ranks]
        shifts = [
            zero if x.shift is None else x.shift
            for zero, (_, x) in zip(zeros, parts, strict=True)
        ]
        return {
            f"{at}a": np.concatenate(a, 1),
            f"{at}b": np.concatenate(b),
            f"{at}of": np.repeat([i for i, _ in parts], ranks).astype(np.int32),
            f"{at}shift": np.concatenate([np.zeros(0, np.float32), *shifts]),
        }

    def _typed(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        is_float = array.dtype == np.float32
        return array.astype(np.float16) if self._half and is_float else array


def _value(array: npt.NDArray[np.generic]) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
