"""LoRA adapters that are merged into a checkpoint as it is read: a map becomes
W + weight * scale * B @ A, in float32 (LoRA, arXiv 2106.09685, section 4.1).

A [r, in] and B [out, r] are PEFT's lora_A and lora_B. Only safetensors are read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from kvlathe.base.adapters import WEIGHTS, Adapter
from kvlathe.base.console import log
from kvlathe.base.digests import sha256_files
from kvlathe.base.errors import KvlatheError
from kvlathe.base.hub import model_name
from kvlathe.export.model.lora_config import (
    LoraConfig,
    read_lora_config,
    refusal,
    unreadable,
)
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.tensor_files import (
    DTYPES,
    TensorFile,
    finite,
    open_tensors,
)
from kvlathe.export.model.tensors import other_names, stored_shapes

NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
OTHER_BASE = "give an adapter of this model"


@dataclass(frozen=True, slots=True)
class Map:
    """A linear map of the checkpoint: its tensor's name there, and whether that is
    [in, out]."""

    stored: str
    inputs: int
    outputs: int
    turned: bool


@dataclass(frozen=True, slots=True)
class Product:
    """The product B @ A that one adapter adds to one map."""

    file: TensorFile
    module: str
    scale: float
    turned: bool

    def matrix(self, device: torch.device) -> Tensor:
        """The product as the checkpoint has the map, float32. Raises KvlatheError for
        numbers that cannot be read, or are not finite."""
        product = self.scale * (self._read("B").to(device) @ self._read("A").to(device))
        return product.T if self.turned else product

    def _read(self, side: str) -> Tensor:
        name = tensor_name(self.module, side)
        try:
            stored = self.file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise KvlatheError(
                f"the tensor {name} cannot be read", str(error), "save it again"
            ) from error
        return finite(stored.float(), name)


class Merged:
    """Products that ``adapters`` add to the maps of a checkpoint, by the checkpoint's
    names of the maps. ``base``: the checkpoint's folder. ``digest`` tells adapters
    apart; it is empty where nothing is added.

    Opening reads headers only. Raises KvlatheError for an adapter that is more than
    LoRA of maps, or of another model.
    """

    def __init__(
        self, adapters: Sequence[Adapter], maps: Mapping[str, Map], base: Path
    ) -> None:
        self._products: dict[str, list[Product]] = {}
        self.digest = b""
        for adapter in adapters:
            config = read_lora_config(adapter)
            _warn_of_other_base(adapter, config, base)
            products = _products(adapter, config, maps)
            if adapter.weight:  # nothing is added by 0, not even to -0.0
                self.digest += _digest(adapter)
                for stored, product in products:
                    self._products.setdefault(stored, []).append(product)

    def changes(self, stored: str) -> bool:
        """Whether anything is added to a tensor of the checkpoint."""
        return stored in self._products

    def added(self, stored: str, tensor: Tensor) -> Tensor:
        """``tensor`` as it is without adapters; else float32, where ``tensor`` is."""
        for product in self._products.get(stored, ()):
            tensor = tensor.float() + product.matrix(tensor.device)
        return tensor


def tensor_name(module: str, side: str) -> str:
    """PEFT's name of A or B of a map."""
    return f"base_model.model.{module}.lora_{side}.weight"


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
        for known in (name, *other_names(spec, name)):
            if known.endswith(".weight"):
                found[known.removesuffix(".weight")] = one
    return found


def _warn_of_other_base(adapter: Adapter, config: LoraConfig, base: Path) -> None:
    """Names of models tell little: folders are renamed. So this is no refusal."""
    said = Path(config.base).name
    own = model_name(base)
    if said and said.lower() != own.lower():
        log.warning(
            "%s was trained on %s, and is merged into %s",
            adapter.folder,
            config.base,
            own,
        )


def _digest(adapter: Adapter) -> bytes:
    digests = (*sha256_files(adapter.files), repr(adapter.weight))
    return hashlib.sha256(" ".join(digests).encode()).digest()


def _products(
    adapter: Adapter, config: LoraConfig, maps: Mapping[str, Map]
) -> list[tuple[str, Product]]:
    """Products of an adapter, each with the checkpoint's name of its map."""
    file = open_tensors(adapter.folder / WEIGHTS)
    found: list[tuple[str, Product]] = []
    for module in _modules(adapter, file):
        if module not in maps:
            raise refusal(
                adapter,
                f"the model has no map {module} that LoRA can be added to",
                OTHER_BASE,
            )
        if not config.names(module):
            raise unreadable(config.path, f"target_modules does not name {module}")
        own = maps[module]
        _check_shapes(adapter, config, file, module, own)
        product = Product(
            file, module, adapter.weight * config.scale(module), own.turned
        )
        found.append((own.stored, product))
    return found


def _modules(adapter: Adapter, file: TensorFile) -> list[str]:
    """Modules of which the file has A and B. Raises KvlatheError for anything else in
    it."""
    names = set(file.keys())
    modules: set[str] = set()
    for name in sorted(names):
        parts = NAME.fullmatch(name)
        if parts is None:
            raise refusal(adapter, f"{name} in it is no LoRA of a linear map")
        modules.add(parts[1])
    for module in sorted(modules):
        for side in "AB":
            name = tensor_name(module, side)
            if name not in names:
                raise refusal(adapter, f"it lacks {name}", "save the adapter again")
    return sorted(modules)


def _check_shapes(
    adapter: Adapter, config: LoraConfig, file: TensorFile, module: str, own: Map
) -> None:
    rank = int(config.rank(module))
    for side, shape in {"A": (rank, own.inputs), "B": (own.outputs, rank)}.items():
        name = tensor_name(module, side)
        header = file.get_slice(name)
        found = tuple(header.get_shape())
        if found != shape:
            reason = (
                f"{name} has shape {list(found)}, and the model takes {list(shape)}"
            )
            raise refusal(adapter, reason, OTHER_BASE)
        if header.get_dtype() not in DTYPES:
            reason = f"{name} is stored as {header.get_dtype()}"
            raise refusal(adapter, reason, f"save it as one of {', '.join(DTYPES)}")
