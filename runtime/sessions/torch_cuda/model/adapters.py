"""LoRA adapters beside the maps of the decoder.

The matrices of all adapters that a session has lie side by side, A [in, N] and B [N,
out] of a map, N ranks in sum. Every row has all of them computed, and keeps its own: so
a step of any mix is the same kernels, which a CUDA graph may hold.

    y = x W + (x A + shift, 0 where the rank is another adapter's) B

Maps that are one product, such as q, k and v, have one A of all of them, and B's blocks
on a diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import torch
from torch import Tensor

from kvlathe.plan.adapter_maps import Float32
from kvlathe.runtime.sessions.adapters import LoadedAdapter
from kvlathe.runtime.sessions.torch_cuda.model.linear import LayerMap

Layout = tuple[int, ...]
"""The adapter's number of each rank of a map."""


class AdapterRows:
    """The adapters of a step's rows, for the maps that it passes."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._owners: dict[Layout, Tensor] = {}  # [N] int32, on the device
        self._rows: Tensor | None = None
        self._left: Tensor | None = None
        self._others: dict[tuple[Layout, bool], Tensor] = {}

    def own(self, layout: Layout) -> None:
        """A map has ranks of this layout."""
        if layout not in self._owners:
            owners = torch.tensor(layout, dtype=torch.int32)
            self._owners[layout] = owners.to(self.device)

    def keep(self, layouts: Set[Layout]) -> None:
        """No map has ranks of other layouts any more."""
        self._owners = {x: self._owners[x] for x in self._owners if x in layouts}

    def begin(self, rows: Tensor | None) -> None:
        """A step, whose rows have adapters of these numbers [T]; None: nobody has
        one."""
        self._rows = None if rows is None else rows[:, None]
        self._left = self._rows
        self._others.clear()

    def leave(self, places: Tensor) -> None:
        """Only the rows ``places`` [R] leave the layer that comes."""
        if self._rows is not None:
            self._left = self._rows.index_select(0, places)
            self._others.clear()

    def others(self, layout: Layout, early: bool) -> Tensor | None:
        """Whether a rank is none of a row's adapter, [T, N]; None where nobody has one.
        ``early``: of all rows of a step, else of those that leave the layer."""
        rows = self._rows if early else self._left
        if rows is None or not layout:
            return None
        key = layout, early
        if key not in self._others:
            self._others[key] = self._owners[layout] != rows
        return self._others[key]


class AdaptedMap:
    """A linear map, or several beside each other, with what adapters add. ``names``: of
    the maps; ``widths``: of their outputs, and of what fills them up, where they are
    several. ``early``: before attention, where a layer
    has all rows."""

    def __init__(
        self,
        own: LayerMap,
        names: Sequence[str],
        widths: Sequence[int],
        rows: AdapterRows,
        early: bool = False,
    ) -> None:
        self.own, self.names, self.widths = own, names, widths
        self.rows, self.early = rows, early
        self.layout: Layout = ()
        self._a = self._b = self._shift = torch.empty(0)
        self._shifts = False

    def load(self, adapters: Sequence[LoadedAdapter], dtype: torch.dtype) -> None:
        """Have these adapters, and no others."""
        layout: list[int] = []
        a: list[Float32] = []
        b: list[Float32] = []
        shifts: list[Float32] = []
        for i, name in enumerate(self.names):
            for adapter in adapters:
                found = adapter.maps.get(name)
                if found is None:
                    continue
                rank = found.a.shape[1]
                before = np.zeros((rank, sum(self.widths[:i])), np.float32)
                after = np.zeros((rank, sum(self.widths[i + 1 :])), np.float32)
                block = np.concatenate([before, found.b, after], 1)
                none = np.zeros(rank, np.float32)
                shifts.append(none if found.shift is None else found.shift)
                a.append(found.a)
                b.append(block)
                layout += [adapter.number] * rank
        held = [torch.empty(0)] * 3
        if layout:
            given = np.concatenate(a, 1), np.concatenate(b), np.concatenate(shifts)
            held = [torch.from_numpy(x).to(self.rows.device, dtype) for x in given]
        self.rows.own(tuple(layout))
        # Until here memory may have run out. What was there goes on then.
        self._a, self._b, self._shift = held
        self._shifts = any(shift.any() for shift in shifts)
        self.layout = tuple(layout)

    def __call__(self, x: Tensor) -> Tensor:
        return self._added(self.own(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x W + bias, and what adapters add."""
        return self._added(self.own.add_to(residual, x), x)

    def begin(self, residual: Tensor, x: Tensor) -> Tensor:
        """``add_to``: there is one shard."""
        return self._added(self.own.begin(residual, x), x)

    def _added(self, y: Tensor, x: Tensor) -> Tensor:
        """y [T, outputs] with what adapters make of x [T, inputs]."""
        others = self.rows.others(self.layout, self.early)
        if others is None:
            return y
        inner = torch.addmm(self._shift, x, self._a) if self._shifts else x @ self._a
        return y.addmm_(inner.masked_fill_(others, 0), self._b)
