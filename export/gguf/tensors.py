"""GgufTensors: the tensors of a GGUF file under a checkpoint's names and in its order,
one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlathe.base import machine
from kvlathe.export.gguf.config import Sizes, architecture_of
from kvlathe.export.gguf.file import Bytes, GgufFile, StoredTensor, require_library
from kvlathe.export.gguf.names import OF_CONFIG

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SYMMETRIC = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}
"""Bits of codes whose zero is the middle one: weight = (code - zero) * scale."""
BLOCK = 32
"""Numbers that share a scale there."""
PIECE = 1 << 18
"""Numbers that a thread makes at once: what it needs beside them stays in caches."""


@dataclass(frozen=True)
class Part:
    """A checkpoint's tensor: ``stored``, or the rows of one expert in it."""

    stored: StoredTensor
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape if self.expert is None else self.stored.shape[1:]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.stored.kind if self.stored.kind in FLOATS else "F32"


class GgufTensors:
    """The tensors of a GGUF file, as an open safetensors file gives them. Codes become
    float32; floats stay as they are. Nothing that was read stays in memory.

    Names that mean nothing to the architecture are ggml's own.
    """

    def __init__(self, path: Path) -> None:
        require_library()
        self.file = GgufFile(path)
        self._architecture = architecture_of(self.file)
        self._sizes = Sizes.of(self.file)
        self._parts = dict(self._named())

    def keys(self) -> Iterable[str]:
        return self._parts.keys()

    def get_slice(self, name: str) -> Part:
        return self._parts[name]

    def get_tensor(self, name: str) -> Tensor:
        return self._read(name, None)

    def get_rows(self, name: str, index: Tensor) -> Tensor:
        """Rows ``index`` [T] of a matrix that no reordering concerns."""
        return self._read(name, index.numpy())

    def scales(self, name: str) -> Tensor | None:
        """[outputs, inputs / BLOCK]: of a map whose codes have their zero in the
        middle; None for any other."""
        part = self._parts[name]
        if part.stored.kind not in SYMMETRIC or len(part.shape) != 2:
            return None
        blocks = self._rows(name, None)
        size = blocks.shape[1] // (part.shape[1] // BLOCK)
        halves = np.ascontiguousarray(blocks.reshape(len(blocks), -1, size)[..., :2])
        return torch.from_numpy(halves.view(np.float16)[..., 0].astype(np.float32))

    def kind(self, name: str) -> str:
        """ggml's name of a tensor's type."""
        return self._parts[name].stored.kind

    def _named(self) -> Iterable[tuple[str, Part]]:
        for name, stored in self.file.tensors.items():
            if name in OF_CONFIG:
                continue
            own = self._architecture.named(name) or name
            if "{e}" not in own:
                yield own, Part(stored)
                continue
            for expert in range(stored.shape[0]):
                yield own.replace("{e}", str(expert)), Part(stored, expert)

    def _rows(self, name: str, index: Bytes | None) -> Bytes:
        """Bytes of the rows of a tensor, in the checkpoint's order."""
        part = self._parts[name]
        rows = self.file.rows_of(part.stored)
        if part.expert is not None:
            rows = rows.reshape(part.stored.shape[0], -1, rows.shape[1])[part.expert]
        if index is not None:
            return rows[index]
        if self._architecture.paired and ("q_proj" in name or "k_proj" in name):
            return _unpaired(rows, part.shape, self._sizes.head_dim)
        return rows

    def _read(self, name: str, index: Bytes | None) -> Tensor:
        part = self._parts[name]
        rows = self._rows(name, index)
        shape = part.shape if index is None else (len(index), *part.shape[1:])
        kind = part.stored.kind
        if kind in FLOATS:
            numbers = torch.frombuffer(bytearray(rows), dtype=FLOATS[kind])
        else:
            numbers = torch.from_numpy(_dequantized(rows, kind, self._threads))
        self.file.forget()
        numbers = numbers.view(shape)
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            return numbers.float() - self._architecture.norm_offset
        return numbers

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(machine.cores())


def _unpaired(rows: Bytes, shape: tuple[int, ...], head_dim: int) -> Bytes:
    """Rows of q or k (numbers of their bias), pair by pair -> the first ones of all
    pairs of a head, then the second ones."""
    flat = rows.reshape(shape[0], -1)
    paired = flat.reshape(-1, head_dim // 2, 2, flat.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _dequantized(
    rows: Bytes, kind: str, threads: ThreadPoolExecutor
) -> NDArray[np.float32]:
    """[rows, bytes] -> float32 [rows, numbers]."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    known = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[known]
    inputs = rows.shape[1] // size * block
    found = np.empty((len(rows), inputs), np.float32)
    step = max(1, PIECE // inputs)

    def piece(start: int) -> None:
        found[start : start + step] = dequantize(rows[start : start + step], known)

    list(threads.map(piece, range(0, len(rows), step)))
    return found
