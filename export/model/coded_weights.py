"""The decoder's weights with those of its maps as codes: what folding gave, quantized
when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvlathe.export.model.quantize import Grid, quantize
from kvlathe.layers.coded_weight import CodedWeight
from kvlathe.plan.weight_formats import WeightFormat, WeightFormats

MAPS = (
    *("q_latent", "q", "k", "v", "out_gate", "o"),
    *("gate", "up", "down", "project", "out"),
)
TABLES = ("embed", "head")
OF_EXPERTS = ("gate", "up", "down")
"""Maps of all experts of a layer, [E, in, out]: ``layers.0.experts.up``."""
GridOf = Callable[[str], Grid | None]
"""A tensor of the decoder by its name -> the grid on which the checkpoint has it."""


def form_of(name: str, formats: WeightFormats) -> WeightFormat | None:
    """The format of the weight ``name`` (``layers.0.q.weight``); None for one that
    stays as it is."""
    *layer, role, kind = name.split(".")
    if role == "experts":
        return formats.maps if kind in OF_EXPERTS else None
    if kind != "weight":
        return None
    if role in TABLES:
        return formats.table
    return formats.maps if layer and role in MAPS else None


def no_grid(name: str) -> Grid | None:
    return None


def stacked(each: Sequence[CodedWeight]) -> CodedWeight:
    """The codes of all experts as one, [E, ...]."""
    codes = torch.stack([one.codes for one in each])
    scales = torch.stack([one.scales for one in each])
    zeros = [one.zeros for one in each if one.zeros is not None]
    return CodedWeight(
        codes, scales, torch.stack(zeros) if zeros else None, each[0].bits
    )


class CodedWeights(Mapping[str, Tensor]):
    """``weights``, whose maps are named ``.codes``, ``.scales`` and ``.zeros``. The
    last one that was quantized is kept: all of its parts are asked for in turn."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        formats: WeightFormats,
        dtype: torch.dtype,
        grid_of: GridOf = no_grid,
    ) -> None:
        self._weights, self._dtype, self._grid_of = weights, dtype, grid_of
        self._forms: dict[str, WeightFormat] = {}
        self._names: list[str] = []
        self._last: tuple[str, CodedWeight] | None = None
        for name in weights:
            form = form_of(name, formats)
            if form is None:
                self._names.append(name)
                continue
            base = name.removesuffix(".weight")
            self._forms[base] = form
            parts = ["codes", "scales", *(["zeros"] if form.zeros else [])]
            self._names += [f"{base}.{part}" for part in parts]

    def __getitem__(self, name: str) -> Tensor:
        base, _, part = name.rpartition(".")
        if base not in self._forms or part == "bias":
            return self._weights[name]
        tensor: Tensor | None = getattr(self._coded(base), part)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def _coded(self, base: str) -> CodedWeight:
        if self._last is not None and self._last[0] == base:
            return self._last[1]
        form, dtype = self._forms[base], self._dtype
        if base in self._weights:  # of experts
            each = [
                quantize(one.T.contiguous(), form, dtype)
                for one in self._weights[base].float()
            ]
            coded = stacked(each)
        else:
            name = f"{base}.weight"
            weight = self._weights[name]
            rows = weight if base == "embed" else weight.T
            grid = self._grid_of(name)
            coded = quantize(rows.contiguous(), form, dtype, grid)
        self._last = base, coded
        return coded

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
