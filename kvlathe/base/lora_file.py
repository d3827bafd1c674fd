"""The products of a LoRA adapter, each of one map of a model: W + scale * B @ A (LoRA,
arXiv 2106.09685, section 4.1). A [r, in] and B [out, r] are PEFT's lora_A and lora_B.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.base.adapters import WEIGHTS, Adapter
from kvlathe.base.lora_config import (
    LoraConfig,
    read_lora_config,
    refusal,
    unreadable,
)
from kvlathe.base.tensor_file import DTYPES, ArrayFile

NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
OTHER_BASE = "give an adapter of this model"
Sizes = tuple[int, int]
"""Inputs and outputs of a map."""
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Product:
    """The product scale * B @ A that an adapter adds to a ``module``."""

    file: ArrayFile
    module: str
    rank: int
    scale: float

    @property
    def a(self) -> Float32:
        """[r, in]. Raises KvlatheError for numbers that are not finite."""
        return self.file.read(tensor_name(self.module, "A"))

    @property
    def b(self) -> Float32:
        """[out, r], unscaled. Raises as ``a``."""
        return self.file.read(tensor_name(self.module, "B"))


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that fits its model. ``base``: the model that it says it is of.
    ``digest`` tells adapters apart: SHA-256 of all that is added."""

    products: tuple[Product, ...]
    base: str
    digest: bytes


def tensor_name(module: str, side: str) -> str:
    """PEFT's name of A or B of a map."""
    return f"base_model.model.{module}.lora_{side}.weight"


def read_lora(adapter: Adapter, maps: Mapping[str, Sizes]) -> LoraAdapter:
    """The products of an adapter to a model with these ``maps``. Reads its files once.
    Raises KvlatheError for an adapter that is more than LoRA of maps, or of another
    model."""
    config = read_lora_config(adapter)
    file = ArrayFile(adapter.folder / WEIGHTS)
    products: list[Product] = []
    for module in _modules(adapter, file):
        if module not in maps:
            raise refusal(
                adapter,
                f"the model has no map {module} that LoRA can be added to",
                OTHER_BASE,
            )
        if not config.names(module):
            raise unreadable(config.path, f"target_modules does not name {module}")
        _check_shapes(adapter, config, file, module, maps[module])
        scale = adapter.weight * config.scale(module)
        products.append(Product(file, module, int(config.rank(module)), scale))
    digests = " ".join((config.digest, file.digest, repr(adapter.weight)))
    digest = hashlib.sha256(digests.encode()).digest()
    return LoraAdapter(tuple(products), config.base, digest)


def _modules(adapter: Adapter, file: ArrayFile) -> list[str]:
    """Modules of which the file has A and B. Raises KvlatheError for anything else in
    it."""
    modules: set[str] = set()
    for name in sorted(file.entries):
        parts = NAME.fullmatch(name)
        if parts is None:
            raise refusal(adapter, f"{name} in it is no LoRA of a linear map")
        modules.add(parts[1])
    for module in sorted(modules):
        for side in "AB":
            name = tensor_name(module, side)
            if name not in file.entries:
                raise refusal(adapter, f"it lacks {name}", "save the adapter again")
    return sorted(modules)


def _check_shapes(
    adapter: Adapter, config: LoraConfig, file: ArrayFile, module: str, sizes: Sizes
) -> None:
    rank = int(config.rank(module))
    inputs, outputs = sizes
    for side, shape in {"A": (rank, inputs), "B": (outputs, rank)}.items():
        name = tensor_name(module, side)
        entry = file.entries[name]
        if entry.shape != shape:
            reason = (
                f"{name} has shape {list(entry.shape)}, and the model takes "
                f"{list(shape)}"
            )
            raise refusal(adapter, reason, OTHER_BASE)
        if entry.dtype not in DTYPES:
            reason = f"{name} is stored as {entry.dtype}"
            raise refusal(adapter, reason, f"save it as one of {', '.join(DTYPES)}")
