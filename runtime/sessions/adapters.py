"""LoadedAdapter: a LoRA adapter as the maps of an engine take it.

Sequences that have one carry it through their steps; a session knows no names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
import numpy.typing as npt

from kvlathe.base.adapters import Adapter
from kvlathe.base.errors import KvlatheError
from kvlathe.base.lora_file import OTHER_BASE, read_lora
from kvlathe.plan.adapter_maps import AdapterMaps, LowRank


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class LoadedAdapter:
    """``maps``: by the engine's names, such as ``layers.0.q``. ``digest``: of the files
    it was read from. ``number``: from 1 on, of no other one in this process. Two are the
    same if they are one object."""

    name: str
    adapter: Adapter
    digest: bytes
    maps: Mapping[str, LowRank]
    number: int = field(default_factory=partial(next, count(1)))

    @property
    def bytes(self) -> int:
        """Bytes of its matrices in the host's memory."""
        return sum(one.a.nbytes + one.b.nbytes for one in self.maps.values())


LARGEST = {
    "float32": float(np.finfo(np.float32).max),
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": 255 * 2.0**120,
}
"""The largest number of each type that an engine computes in."""
Adapters = Sequence[LoadedAdapter | None]
"""Of each sequence of a step; None: none."""


def read_adapter(
    name: str, adapter: Adapter, maps: AdapterMaps, dtype: str
) -> LoadedAdapter:
    """Raises KvlatheError for an adapter that is none of the engine's model, or more
    than this, and for numbers that are too large for ``dtype``, the engine's type."""
    found: dict[str, LowRank] = {}
    read = read_lora(adapter, maps.sizes)
    for product in read.products:
        a, b = product.a, product.b
        for own in maps.of(product.module):
            if own.name in found:
                raise KvlatheError(
                    f"{adapter.folder} cannot be used",
                    f"it changes {own.name} twice, the second time as {product.module}",
                    OTHER_BASE,
                )
            with np.errstate(over="ignore", invalid="ignore"):
                found[own.name] = maps.folded(own, a, b, product.scale)
            _check_finite(adapter, own.name, found[own.name], dtype)
    return LoadedAdapter(name, adapter, read.digest, found)


def _check_finite(adapter: Adapter, name: str, map_: LowRank, dtype: str) -> None:
    """B multiplies the zeros of all other rows of a step: one infinity in it would make
    them NaN."""
    for array in (map_.a, map_.b, map_.shift):
        if array is None or np.abs(array).max(initial=0) <= LARGEST[dtype]:
            continue
        raise KvlatheError(
            f"{adapter.folder} cannot be used",
            f"what it adds to {name} is not finite in {dtype}, the engine's type",
            "give it a smaller weight, as in PATH=0.01, or build the engine in a type "
            "of a wider range",
        )


def distinct(adapters: Adapters) -> tuple[LoadedAdapter, ...]:
    """Those of a step, each once, always in the same order."""
    there = {one.number: one for one in adapters if one is not None}
    return tuple(there[number] for number in sorted(there))


def row_numbers(
    adapters: Adapters, ends: npt.NDArray[np.int32], rows: int
) -> npt.NDArray[np.int32]:
    """The adapter's number of each of so many ``rows``; 0: none. ``ends`` [B + 1]:
    where each sequence's rows begin."""
    own = [0 if one is None else one.number for one in adapters]
    numbers = np.zeros(rows, np.int32)
    numbers[: ends[-1]] = np.repeat(own, np.diff(ends))
    return numbers
