"""Checkpoint: the weights of a Hugging Face folder, one tensor at a time, under the
decoder's names and in its layout.

Safetensors and GGUF files are read: they hold numbers and nothing that could run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from kvlathe.base import chat_template, tokenizer_files
from kvlathe.base.adapters import Adapter
from kvlathe.base.digests import sha256_files
from kvlathe.base.errors import KvlatheError
from kvlathe.export.gguf.tensors import GgufTensors
from kvlathe.export.model import guessing, latent, mixer_tensors, stacked
from kvlathe.export.model.coded_weights import MAPS
from kvlathe.export.model.device import CPU
from kvlathe.export.model.lora import Merged, maps_of
from kvlathe.export.model.packed import Header, Packing
from kvlathe.export.model.quantize import Grid
from kvlathe.export.model.scaled_config import BESIDE
from kvlathe.export.model.shards import DOWNLOAD, weight_files
from kvlathe.export.model.spec import DecoderSpec, read_config, spec_of
from kvlathe.export.model.stored_codes import (
    CodedMap,
    StoredCodes,
    read_codes,
    weight_name,
)
from kvlathe.export.model.tensor_files import DTYPES, finite, forget, open_tensors
from kvlathe.export.model.tensors import (
    apply_factor,
    cut,
    expert_names,
    made,
    other_names,
    stacked_as_stored,
    stored_name,
    stored_shapes,
    weight_names,
)

INERT = re.compile(
    r"(rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias|\.attn\.causal_mask)$"
)
"""Constants that older checkpoints store and nothing reads."""


class Checkpoint:
    """A checkpoint folder: ``spec`` describes its decoder, ``weight`` and ``tensor``
    read it, a tensor a call, onto ``device``.

    Opening it reads headers, and of codes their zeros and their order. It raises
    KvlatheError unless every tensor that the decoder needs is there in the right shape
    and no other tensor is (an unknown weight means that the model computes something
    else than we would). It also raises for
    tokenizer files that no engine could load, and for a chat template that cannot run.
    Maps are read with the LoRA ``adapters`` merged in.
    """

    def __init__(
        self,
        path: Path | str,
        max_seq_len: int | None = None,
        device: torch.device = CPU,
        adapters: Sequence[Adapter] = (),
        guesses: bool = False,
    ) -> None:
        """``guesses``: not the model but its layer that guesses tokens, as a model of its
        own (export/model/guessing.py)."""
        self.path = Path(path)
        self.device = device
        raw = read_config(self.path)
        spec = spec_of(raw, max_seq_len)
        form = read_codes(raw)
        self.codes = StoredCodes(form, self._header, self._stored)
        self.files = weight_files(self.path)
        self._where: guessing.Files = {
            name: file
            for file in map(open_tensors, self.files)
            for name in file.keys()  # noqa: SIM118
        }
        spec = replace(spec, gives_hidden=guessing.has_layer(spec, self._where))
        if guesses:
            own = spec_of(guessing.settings_of(raw), max_seq_len)
            spec, self._where = guessing.alone(own, spec.layers, self._where)
        spec = stacked.corrected_as_stored(spec, self._where)
        spec = stacked_as_stored(spec, self._header)
        self.aliases = _aliases(spec, self._where)
        self.spec: DecoderSpec = self._with_real_head(spec)
        self._check()
        self.codes.settle(self._coded_maps())
        self._refuse_codes(adapters)
        self._merged = Merged(adapters, maps_of(self.spec, self.aliases), self.path)
        tokenizer_files.check(self.path, self.spec.vocab_size)
        chat_template.check(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in the folder, as the folder calls them."""
        return tuple(sorted(self._where))

    @property
    def packing(self) -> Packing | None:
        """The integers that its maps are, where an engine of as many bits can keep them."""
        return self.codes.packing

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """The decoder's tensors before folding, as ``weight`` calls them, in the
        decoder's order."""
        return weight_names(self.spec)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over config.json, what lies beside it and all weight files, and over what adapters add."""
        total = hashlib.sha256()
        said = [
            x for x in (self.path / "config.json", self.path / BESIDE) if x.is_file()
        ]
        for digest in sha256_files([*said, *self.files]):
            total.update(bytes.fromhex(digest))
        total.update(self._merged.digest)
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
        unstored = made(self.spec, name)
        if unstored is not None:
            return unstored.to(self.device)
        if stacked.is_own(self.spec, name):
            own = finite(stacked.read(self.spec, name, self._placed), name)
            return apply_factor(self.spec, name, own)
        if mixer_tensors.is_own(name):
            return finite(mixer_tensors.read(self.spec, name, self._placed), name)
        if latent.is_own(self.spec, name):
            own = finite(latent.read(self.spec, name, self._beside(name)), name)
            return apply_factor(self.spec, name, own)
        experts = expert_names(self.spec, name)
        if experts:
            own = self.spec.family.experts
            is_turned = bool(own and own.router_in_out and name.endswith(".router"))
            maps = self._of_experts(experts, is_turned)
            return apply_factor(self.spec, name, maps)
        source = stored_name(self.spec, name)
        stored = self._read(source)
        part = cut(self.spec, name, stored.to(self.device))
        weight = finite(part.contiguous().float(), source)
        self._forget(source, stored, weight)
        return apply_factor(self.spec, name, weight)

    def grid(self, name: str) -> Grid | None:
        """The grid on which the checkpoint has the decoder's map ``name``, its outputs
        in the decoder's order; None where it has floats, or where groups are out of
        order."""
        if latent.is_own(self.spec, name) or mixer_tensors.is_own(name):
            return None
        stored = stored_name(self.spec, name)
        gguf = self._gguf(stored)
        if gguf is not None:
            scales = gguf.scales(self.aliases.get(stored, stored))
            if scales is None or self._is_merged(stored):
                return None
            scales = cut(self.spec, name, scales.to(self.device))
            return Grid(apply_factor(self.spec, name, scales), None)
        codes = self._coded(stored)
        own = codes.grid() if codes is not None and codes.order is None else None
        if own is None:
            return None
        zeros = own.zeros
        scales = cut(self.spec, name, self._turned(own.scales))
        if zeros is not None:
            zeros = cut(self.spec, name, self._turned(zeros))
        return Grid(apply_factor(self.spec, name, scales), zeros, own.is_float)

    def kinds(self) -> dict[str, str]:
        """The decoder's maps -> ggml's types of what is stored, in a GGUF file; empty
        for any other."""
        found: dict[str, str] = {}
        for name in self.weights:
            *layer, role, kind = name.split(".")
            is_map = role in MAPS and not mixer_tensors.is_own(name)
            stored = stored_name(self.spec, name) if is_map else ""
            file = self._gguf(stored)
            if layer and kind == "weight" and file is not None:
                found[name] = file.kind(self.aliases.get(stored, stored))
        return found

    @cached_property
    def disordered(self) -> str:
        """The first map whose groups of inputs do not follow one another (GPTQ with
        desc_act); empty where there is none."""
        found = (x for x in self._coded_maps() if x.order is not None)
        first = next(found, None)
        return first.name if first is not None else ""

    def _coded_maps(self) -> list[CodedMap]:
        """The folder's maps that are stored as codes."""
        found = map(self._coded, stored_shapes(self.spec))
        return [codes for codes in found if codes is not None]

    def _coded(self, name: str) -> CodedMap | None:
        """The folder's map ``name``, where it is stored as codes."""
        return self.codes.of(self.aliases.get(name, name))

    def _turned(self, matrix: Tensor) -> Tensor:
        """[in, out] as the family stores it."""
        return (matrix if self.spec.family.in_out else matrix.mT).to(self.device)

    def _of_experts(self, names: list[str], is_turned: bool) -> Tensor:
        """[E, in, out] of the maps of all experts, [in, out] of one map, which may be
        stored so."""
        maps: list[Tensor] = []
        for name in names:
            stored = self._read(name)
            turned = stored.to(self.device)
            if not is_turned:
                turned = turned.T
            own = turned.contiguous().float()
            maps.append(finite(own, name))
            self._forget(name, stored, own)
        return torch.stack(maps) if len(maps) > 1 else maps[0]

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Rows ``index`` [T] of ``weight(name)``, an embedding, float32 [T, D]: only
        those are read."""
        unstored = made(self.spec, name)
        if unstored is not None:
            return unstored[index.cpu()].to(self.device)
        source = stored_name(self.spec, name)
        gguf = self._gguf(source)
        if gguf is not None and not self._is_merged(source):
            rows = gguf.get_rows(self.aliases.get(source, source), index.cpu())
        else:
            rows = cut(self.spec, name, self._read(source))[index.cpu()]
        return apply_factor(
            self.spec, name, finite(rows.to(self.device).float(), source)
        )

    def as_stored(self, name: str) -> Tensor:
        """The numbers that ``weight(name)`` is made of, in their own dtype: on a CPU a
        view of the mapped file, where it holds them as they are."""
        stored = self._read(stored_name(self.spec, name)).to(self.device)
        return cut(self.spec, name, stored)

    def tensor(self, name: str) -> Tensor:
        """The folder's tensor ``name``, float32, as stored. Raises as ``weight``
        does."""
        return finite(self._read(name).to(self.device).float(), name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the folder's tensor ``name``, from its header."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def _beside(self, name: str) -> Callable[[str], Tensor]:
        """A reader of the tensors that lie in the layer of ``name``, by role and kind."""
        layer = name.split(".")[1]
        return lambda end: self._placed(stored_name(self.spec, f"layers.{layer}.{end}"))

    def _placed(self, name: str) -> Tensor:
        return self._read(name).to(self.device)

    def _read(self, name: str) -> Tensor:
        """A view of the mapped file: nothing is copied until it is used. Codes become
        the numbers they stand for, and adapters are added."""
        codes = self._coded(name)
        if codes is not None:
            return self._turned(codes.matrix())
        stored = self._stored(name)
        if not self._is_merged(name):
            return stored
        return self._merged.added(self.aliases.get(name, name), stored.to(self.device))

    def _is_merged(self, name: str) -> bool:
        return self._merged.changes(self.aliases.get(name, name))

    def _forget(self, name: str, stored: Tensor, copy: Tensor) -> None:
        """Let go of what was read, where it is of the mapped file."""
        is_copy = bool(self.codes) or self._gguf(name) is not None
        if not is_copy and not self._is_merged(name):
            forget(stored, copy)

    def _gguf(self, name: str) -> GgufTensors | None:
        """The GGUF file that holds the folder's tensor ``name``."""
        file = self._where.get(self.aliases.get(name, name))
        return file if isinstance(file, GgufTensors) else None

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
        return KvlatheError(
            f"{self.path} lacks the tensor {name}", "the decoder needs it", DOWNLOAD
        )

    # -- checks on opening -------------------------------------------------------------
    def _refuse_codes(self, adapters: Sequence[Adapter]) -> None:
        if adapters and self.codes:
            raise KvlatheError(
                f"no adapter can be merged into {self.path}",
                "its weights are codes, and the sum is not on their grid",
                "give the checkpoint that they were made of",
            )

    def _with_real_head(self, spec: DecoderSpec) -> DecoderSpec:
        """Compare as transformers does: a head that differs from the embedding is not
        tied, whatever config.json says."""
        embed, head = (
            f"{spec.family.names[role]}.weight" for role in ("embed", "head")
        )
        names = (head, *other_names(spec, head))
        stored = [x for x in names if x in self._where or self.codes.of(x) is not None]
        if not spec.tied_head or not stored or self.aliases.get(embed) in stored:
            return spec
        if self.codes.of(stored[0]) is None:
            own, shared = self._stored(stored[0]), self._stored(embed)
            if own.dtype == shared.dtype and torch.equal(own, shared):
                return spec
        untied = replace(spec, tied_head=False)
        self.aliases = _aliases(untied, self._where)  # the head is one of its tensors
        return untied

    def _check(self) -> None:
        wanted = stored_shapes(self.spec)
        known = {f"{self.spec.family.names['head']}.weight"}
        packed = stacked.bytes_names(self.spec)
        for name, shape in wanted.items():
            stored = self.aliases.get(name, name)
            known.add(stored)
            codes = self._coded(name)
            if codes is not None:
                parts = self._check_codes(codes, shape)
                known |= parts
                if stored in self._where and stored not in parts:
                    raise KvlatheError(
                        f"the checkpoint holds {stored} as codes and as numbers",
                        "nothing says which of them is meant",
                        "remove one, or download the checkpoint again",
                    )
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
            is_inert = INERT.search(name) or self.codes.passes(name)
            if name not in known and not is_inert:
                raise KvlatheError(
                    f"the checkpoint holds the tensor {name}",
                    f"a {self.spec.model_type} with this config.json has none, and leaving it out changes results",
                    "check that config.json belongs to the weights",
                )

    def _check_codes(self, codes: CodedMap, shape: tuple[int, ...]) -> set[str]:
        """The names of its parts."""
        *lead, rows, columns = shape
        if self.spec.family.in_out:
            rows, columns = columns, rows
        names = codes.checked((*lead, rows, columns))
        bias = f"{codes.name}.bias"
        if bias in self._where and not bool(self._stored(bias).any()):
            names.add(bias)  # older ones give every map a bias of zeros
        return names

    def _header(self, name: str) -> Header | None:
        """The shape and dtype of a tensor of the folder, if it is there."""
        if name not in self._where:
            return None
        header = self._where[name].get_slice(name)
        return tuple(header.get_shape()), header.get_dtype()

    def _is_beside(self, name: str) -> bool:
        """Whether a tensor is of a part of the model that is not run."""
        family = self.spec.family
        bare = name.removeprefix("model.")
        inner = bare.removeprefix(f"{family.inside}.").removeprefix("model.")
        return any(one.startswith(family.beside) for one in (bare, inner))

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


def _aliases(spec: DecoderSpec, where: Iterable[str]) -> dict[str, str]:
    """Expected names whose tensor is stored under another. Of two tied tensors either
    may be the one that is stored."""
    names = stored_shapes(spec)
    stored = set(map(weight_name, where))
    aliases: dict[str, str] = {}
    for name in names:
        found = [other for other in other_names(spec, name) if other in stored]
        if name not in stored and found:
            aliases[name] = found[0]
    embed, head = (f"{spec.family.names[role]}.weight" for role in ("embed", "head"))
    has_embed = {embed, aliases.get(embed)} & stored
    if spec.tied_head and not has_embed and head in stored:
        aliases[embed] = head
    return aliases
