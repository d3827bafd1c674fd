"""LoRA adapters that are merged into a checkpoint as it is read: a map becomes
W + weight * scale * B @ A, in float32 (kvlathe/base/lora_file.py reads them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvlathe.base.adapters import Adapter
from kvlathe.base.console import log
from kvlathe.base.hub import model_name
from kvlathe.base.lora_file import Product, read_lora
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.tensors import other_names, stored_shapes


@dataclass(frozen=True, slots=True)
class Map:
    """A linear map of the checkpoint: its tensor's name there, and whether that is
    [in, out]."""

    stored: str
    inputs: int
    outputs: int
    turned: bool

    def added(self, product: Product, device: torch.device) -> Tensor:
        """What a product adds, as the checkpoint has the map, float32. Raises
        KvlatheError for numbers that are not finite."""
        a, b = (torch.from_numpy(x).to(device) for x in (product.a, product.b))
        matrix = product.scale * (b @ a)
        return matrix.T if self.turned else matrix


class Merged:
    """Products that ``adapters`` add to the maps of a checkpoint, by the checkpoint's
    names of the maps. ``base``: the checkpoint's folder. ``digest`` tells adapters
    apart; it is empty where nothing is added.

    Opening reads the adapters. Raises KvlatheError for an adapter that is more than
    LoRA of maps, or of another model.
    """

    def __init__(
        self, adapters: Sequence[Adapter], maps: Mapping[str, Map], base: Path
    ) -> None:
        self._products: dict[str, list[tuple[Map, Product]]] = {}
        self.digest = b""
        sizes = {name: (own.inputs, own.outputs) for name, own in maps.items()}
        for adapter in adapters:
            found = read_lora(adapter, sizes)
            _warn_of_other_base(adapter, found.base, base)
            if adapter.weight:  # nothing is added by 0, not even to -0.0
                self.digest += found.digest
                for product in found.products:
                    own = maps[product.module]
                    self._products.setdefault(own.stored, []).append((own, product))

    def changes(self, stored: str) -> bool:
        """Whether anything is added to a tensor of the checkpoint."""
        return stored in self._products

    def added(self, stored: str, tensor: Tensor) -> Tensor:
        """``tensor`` as it is without adapters; else float32, where ``tensor`` is."""
        for own, product in self._products.get(stored, ()):
            tensor = tensor.float() + own.added(product, tensor.device)
        return tensor


def maps_of(spec: DecoderSpec, aliases: Mapping[str, str]) -> dict[str, Map]:
    """Every linear map of a checkpoint, by all names that models with it have."""
    tables = ("embed", "positions", "head")
    apart = {f"{spec.family.names.get(role)}.weight": role for role in tables}
    found: dict[str, Map] = {}
    for name, shape in stored_shapes(spec).items():
        role = apart.get(name)
        if len(shape) != 2 or role in ("embed", "positions"):
            continue
        turned = spec.family.in_out and role is None
        inputs, outputs = shape if turned else shape[::-1]
        one = Map(aliases.get(name, name), inputs, outputs, turned)
        for known in modules_of(spec, name):
            found[known] = one
    return found


def modules_of(spec: DecoderSpec, name: str) -> list[str]:
    """Names that models have for the module of a checkpoint's weight ``name``."""
    every = (name, *other_names(spec, name))
    end = ".weight"
    return [known.removesuffix(end) for known in every if known.endswith(end)]


def _warn_of_other_base(adapter: Adapter, said: str, base: Path) -> None:
    """Names of models tell little: folders are renamed. So this is no refusal."""
    own = model_name(base)
    if said and Path(said).name.lower() != own.lower():
        log.warning(
            "%s was trained on %s, and is merged into %s", adapter.folder, said, own
        )
