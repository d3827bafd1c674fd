"""Checkpoint: the weights of a Hugging Face folder, one tensor at a time, under the
decoder's names and in its layout.

Only safetensors are read: they hold numbers and nothing that could run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlathe.base import chat_template, tokenizer_files
from kvlathe.base.digests import sha256_files
from kvlathe.base.errors import KvlatheError
from kvlathe.export.model import stacked
from kvlathe.export.model.device import CPU
from kvlathe.export.model.mapped import forget
from kvlathe.export.model.packed import PackedMap, Packing, read_packing
from kvlathe.export.model.quantize import Grid
from kvlathe.export.model.shards import DOWNLOAD, weight_files
from kvlathe.export.model.spec import DecoderSpec, read_config, read_spec
from kvlathe.export.model.tensors import (
    added,
    cut,
    expert_names,
    scaled,
    stored_name,
    stored_shapes,
    weight_names,
)

DTYPES = ("F64", "F32", "F16", "BF16")
INERT = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")
"""Constants that older checkpoints store and nothing reads."""


class Checkpoint:
    """A checkpoint folder: ``spec`` describes its decoder, ``weight`` and ``tensor``
    read it, a tensor a call, onto ``device``.

    Opening it reads headers only, and raises KvlatheError unless every tensor that the
    decoder needs is there in the right shape and no other tensor is (an unknown weight
    means that the model computes something else than we would). It also raises for
    tokenizer files that no engine could load, and for a chat template that cannot run.
    """

    def __init__(
        self,
        path: Path | str,
        max_seq_len: int | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.path = Path(path)
        self.device = device
        spec = read_spec(self.path, max_seq_len)
        self.packing: Packing | None = read_packing(read_config(self.path))
        self.files = weight_files(self.path)
        self._where = {
            name: file
            for file in map(_open, self.files)
            for name in file.keys()  # noqa: SIM118
        }
        self.aliases = _aliases(spec, self._where)
        self.spec: DecoderSpec = self._with_real_head(spec)
        self._check()
        tokenizer_files.check(self.path, self.spec.vocab_size)
        chat_template.check(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in the folder, as the folder calls them."""
        return tuple(sorted(self._where))

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """The decoder's tensors before folding, as ``weight`` calls them, in the
        decoder's order."""
        return weight_names(self.spec)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over config.json and all weight files."""
        total = hashlib.sha256()
        for digest in sha256_files([self.path / "config.json", *self.files]):
            total.update(bytes.fromhex(digest))
        return total.hexdigest()

    def has(self, weight: str) -> bool:
        """Whether ``weight`` is one of ``weights``: which biases there are differs by
        family."""
        return weight in self._weight_set

    @cached_property
    def _weight_set(self) -> frozenset[str]:
        return frozenset(self.weights)

    def weight(self, name: str) -> Tensor:
        """The decoder's tensor ``name`` (``layers.0.q.weight`` ...), float32,
        contiguous.

        Linear weights are [in, out]. Heads are in order, KV head by KV head, and the
        dims of q and k (weights, biases and norms) in Rope's canonical order. Raises
        KvlatheError if it cannot be read or is not finite.
        """
        if added(self.spec, name):
            return torch.zeros(self.spec.hidden_size, device=self.device)
        if stacked.is_own(self.spec, name):
            whole = stacked.read(self.spec, name, self._placed)
            return _finite(whole, name)
        experts = expert_names(self.spec, name)
        if experts:
            return self._of_experts(experts)
        source = stored_name(self.spec, name)
        stored = self._read(source)
        part = cut(self.spec, name, stored.to(self.device))
        weight = _finite(part.contiguous().float(), source)
        if self.packing is None:
            forget(stored, weight)
        return scaled(self.spec, name, weight)

    def grid(self, name: str) -> Grid | None:
        """The grid on which the checkpoint has the decoder's map ``name``, its outputs in
        the decoder's order; None where it has floats, or where groups are out of order."""
        source = stored_name(self.spec, name)
        codes = self._packed(source)
        if codes is None or codes.order is not None:
            return None
        own = codes.grid()
        scales, zeros = (self._turned(x) for x in (own.scales, own.zeros))
        scales = cut(self.spec, name, scales)
        zeros = cut(self.spec, name, zeros)
        return Grid(scaled(self.spec, name, scales), zeros)

    @cached_property
    def disordered(self) -> str:
        """The first map whose groups of inputs do not follow one another (GPTQ with
        desc_act); empty where there is none."""
        for name in self._where:
            base = name.removesuffix(".g_idx")
            if base != name:
                codes = self._packed(f"{base}.weight")
                if codes is not None and codes.order is not None:
                    return base
        return ""

    def _packed(self, name: str) -> PackedMap | None:
        """The folder's map ``name``, where it is stored as codes."""
        stored = self.aliases.get(name, name)
        base = stored.removesuffix(".weight")
        if self.packing is None or f"{base}.qweight" not in self._where:
            return None
        return PackedMap(
            self.packing, base, self._stored, f"{base}.g_idx" in self._where
        )

    def _turned(self, matrix: Tensor) -> Tensor:
        """[in, out] as the family stores it."""
        return (matrix if self.spec.family.in_out else matrix.T).to(self.device)

    def _of_experts(self, names: list[str]) -> Tensor:
        """[E, in, out] of the maps of all experts, [in, out] of one map."""
        maps: list[Tensor] = []
        for name in names:
            stored = self._read(name)
            own = stored.to(self.device).T.contiguous().float()
            maps.append(_finite(own, name))
            forget(stored, own)
        return torch.stack(maps) if len(maps) > 1 else maps[0]

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Rows ``index`` [T] of ``weight(name)``, an embedding, float32 [T, D]: only
        those are read."""
        source = stored_name(self.spec, name)
        table = cut(self.spec, name, self._read(source))
        rows = table[index.cpu()]
        numbers = _finite(rows.to(self.device).float(), source)
        return scaled(self.spec, name, numbers)

    def tensor(self, name: str) -> Tensor:
        """The folder's tensor ``name``, float32, as stored. Raises as ``weight``
        does."""
        return _finite(self._read(name).to(self.device).float(), name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the folder's tensor ``name``, from its header."""
        header = self._where[name].get_slice(name)
        return tuple(header.get_shape())

    def _placed(self, name: str) -> Tensor:
        return self._read(name).to(self.device)

    def _read(self, name: str) -> Tensor:
        """A view of the mapped file: nothing is copied until it is used. Codes become
        the numbers they stand for."""
        codes = self._packed(name)
        return self._stored(name) if codes is None else self._turned(codes.matrix())

    def _stored(self, name: str) -> Tensor:
        stored = self.aliases.get(name, name)
        if stored not in self._where:
            raise self._lacks(name)
        try:
            return self._where[stored].get_tensor(stored)
        except (SafetensorError, OSError, RuntimeError, AttributeError) as error:
            raise KvlatheError(
                f"the tensor {name} cannot be read", str(error), DOWNLOAD
            ) from error

    def _lacks(self, name: str) -> KvlatheError:
        fact = f"{self.path} lacks the tensor {name}"
        return KvlatheError(fact, "the decoder needs it", DOWNLOAD)

    # -- checks on opening -------------------------------------------------------------
    def _with_real_head(self, spec: DecoderSpec) -> DecoderSpec:
        """As transformers does: a head that differs from the embedding is not tied,
        whatever config.json says."""
        embed, head = (
            f"{spec.family.names[role]}.weight" for role in ("embed", "head")
        )
        if (
            not spec.tied_head
            or head not in self._where
            or self.aliases.get(embed) == head
        ):
            return spec
        same = torch.equal(self._read(head), self._read(embed))
        return spec if same else dataclasses.replace(spec, tied_head=False)

    def _check(self) -> None:
        wanted = stored_shapes(self.spec)
        known = {f"{self.spec.family.names['head']}.weight"}
        packed = stacked.bytes_names(self.spec)
        for name, shape in wanted.items():
            stored = self.aliases.get(name, name)
            known.add(stored)
            codes = self._packed(name)
            if codes is not None:
                known |= self._check_codes(codes, shape)
                continue
            if stored not in self._where:
                raise self._lacks(name)
            header = self._where[stored].get_slice(stored)
            dtypes = ("U8",) if name in packed else DTYPES
            self._check_header(
                name, tuple(header.get_shape()), shape, header.get_dtype(), dtypes
            )
        for name in self._where:
            if self._is_beside(name):
                continue
            if name not in known and not INERT.search(name):
                raise KvlatheError(
                    f"the checkpoint holds the tensor {name}",
                    f"a {self.spec.model_type} with this config.json has none, and leaving it out changes results",
                    "check that config.json belongs to the weights",
                )

    def _check_codes(self, codes: PackedMap, shape: tuple[int, ...]) -> set[str]:
        """The names of its parts."""
        inputs, outputs = shape if self.spec.family.in_out else shape[::-1]
        names = codes.checked(inputs, outputs, self._shape)
        bias = f"{codes.name}.bias"
        if bias in self._where and not bool(self._stored(bias).any()):
            names.add(bias)  # older ones give every map a bias of zeros
        return names

    def _shape(self, name: str) -> tuple[int, ...] | None:
        return self.shape(name) if name in self._where else None

    def _is_beside(self, name: str) -> bool:
        """Whether a tensor is of a part of the model that is not run."""
        beside = self.spec.family.beside
        return bool(beside) and name.removeprefix("model.").startswith(beside)

    @staticmethod
    def _check_header(
        name: str,
        shape: tuple[int, ...],
        wanted: tuple[int, ...],
        dtype: str,
        dtypes: tuple[str, ...],
    ) -> None:
        if shape != wanted:
            raise KvlatheError(
                f"the tensor {name} has shape {list(shape)}",
                f"config.json makes it {list(wanted)}",
                "check that config.json belongs to the weights",
            )
        if dtype not in dtypes:
            raise KvlatheError(
                f"the tensor {name} is stored as {dtype}",
                f"only {', '.join(dtypes)} are read",
                "convert the checkpoint",
            )


class _Header(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _File(Protocol):
    """What is used of safetensors' open file."""

    def keys(self) -> Iterable[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Header: ...


def _open(path: Path) -> _File:
    try:
        return safe_open(path, framework="pt")  # type: ignore[no-any-return]
    except (SafetensorError, OSError) as error:
        raise KvlatheError(
            f"{path} cannot be read", f"it is truncated or damaged ({error})", DOWNLOAD
        ) from error


def _aliases(spec: DecoderSpec, where: Iterable[str]) -> dict[str, str]:
    """Expected names whose tensor is stored under another.

    Base models lack the first part of every name (``transformer.h.0...`` is
    ``h.0...``), text parts of larger models have one more, and of two tied tensors
    either may be the one that is stored.
    """
    names = stored_shapes(spec)
    stored = set(where)
    aliases: dict[str, str] = {}
    for name in names:
        first, _, bare = name.partition(".")
        others = [bare]
        if spec.family.beside:
            others = [f"language_model.{name}", f"{first}.language_model.{bare}"]
        found = [other for other in others if other in stored]
        if name not in stored and found:
            aliases[name] = found[0]
    embed, head = (f"{spec.family.names[role]}.weight" for role in ("embed", "head"))
    has_embed = {embed, aliases.get(embed)} & stored
    if spec.tied_head and not has_embed and head in stored:
        aliases[embed] = head
    return aliases


def _finite(tensor: Tensor, name: str) -> Tensor:
    low, high = torch.aminmax(
        tensor
    )  # both are NaN if any element is: one pass, no copy
    if not torch.isfinite(low + high):
        raise KvlatheError(
            f"the tensor {name} holds NaN or infinite numbers",
            "no sound result comes of it",
            DOWNLOAD,
        )
    return tensor
