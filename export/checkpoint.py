"""Checkpoint: the weights of a Hugging Face folder, one tensor at a time, under the decoder's own names and in its own layout.

Only safetensors are read: they hold numbers and nothing that could run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from kvlathe.errors import KvlatheError
from kvlathe.export.spec import DecoderSpec, read_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
LAYER_ROLES = ("attn_norm", "q", "k", "v", "q_norm", "k_norm", "o", "mlp_norm", "gate", "up", "down")
NORMS = ("attn_norm", "mlp_norm", "norm")
DTYPES = {"F64", "F32", "F16", "BF16"}
INERT = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")
"""Constants that older checkpoints store and nothing reads."""

DOWNLOAD = "download the checkpoint again"


class Checkpoint:
    """A checkpoint folder. ``spec`` describes its decoder; ``tensor`` and ``weight`` read it, float32, one tensor a call.

    Opening it reads headers only, and raises KvlatheError unless every tensor that the decoder needs is there in the right
    shape and no other tensor is (an unknown weight means that the model computes something else than we would).
    """

    def __init__(self, path: Path | str, max_seq_len: int | None = None) -> None:
        self.path = Path(path)
        self.spec: DecoderSpec = read_spec(self.path, max_seq_len)
        self.files: tuple[Path, ...] = weight_files(self.path)
        self._where = {name: handle for handle in map(_open, self.files) for name in handle.keys()}  # noqa: SIM118
        self.spec = _with_real_head(self)
        _check(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in the folder, as the folder calls them."""
        return tuple(sorted(self._where))

    @property
    def weights(self) -> tuple[str, ...]:
        """The decoder's tensors before folding, as ``weight`` calls them, in the decoder's order."""
        return tuple(_weights(self.spec))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over config.json and all weight files."""
        total = hashlib.sha256()
        for path in (self.path / "config.json", *self.files):
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def tensor(self, name: str) -> torch.Tensor:
        """The folder's tensor ``name``, float32, as stored. Raises KvlatheError if it is missing or not finite."""
        return _finite(self._raw(name).float(), name)

    def weight(self, name: str) -> torch.Tensor:
        """The decoder's tensor ``name`` (``layers.0.q.weight`` ...), float32, contiguous.

        Linear weights are [in, out]. Heads are in order, KV head by KV head, and the dims of q and k (weights, biases and
        norms) in Rope's canonical order. A bias that the model lacks is missing here too.
        """
        *layer, role, kind = name.removeprefix("layers.").split(".")
        source = self._source(role, layer[0] if layer else "", kind)
        stored = self._raw(source)
        transposed = stored.ndim == 2 and role not in ("embed", "positions") and not (self.spec.family.in_out and layer)
        part = _part(self.spec, role, stored.T if transposed else stored)
        return _finite(torch.empty(part.shape, dtype=torch.float32).copy_(part), source)

    def has(self, name: str) -> bool:
        return name in self._all

    @cached_property
    def _all(self) -> frozenset[str]:
        return frozenset(self.weights)

    def _source(self, role: str, layer: str, kind: str) -> str:
        names = self.spec.family.names
        return f"{names.get(role) or names[FUSED[role]]}.{kind}".replace("{i}", layer)

    def _resolve(self, name: str) -> str:
        """Base models are stored without the first part of their names (``transformer.h.0...`` as ``h.0...``)."""
        return name if name in self._where else name.split(".", 1)[1]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The stored shape of the folder's tensor ``name``, from its header; None if there is none."""
        handle = self._where.get(self._resolve(name))
        return tuple(handle.get_slice(self._resolve(name)).get_shape()) if handle else None

    def _raw(self, name: str) -> torch.Tensor:
        """A view of the mapped file: nothing is copied until it is used."""
        stored = self._resolve(name)
        if stored not in self._where:
            raise KvlatheError(f"{self.path} lacks the tensor {name}", "the decoder needs it", DOWNLOAD)
        try:
            return self._where[stored].get_tensor(stored)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise KvlatheError(f"the tensor {name} cannot be read", str(error), DOWNLOAD) from error


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint folder. Raises KvlatheError if there are none, and for pickled weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _shards(index)
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    pickled = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
    if pickled:
        raise KvlatheError(
            f"the weights in {folder} are pickled ({pickled[0]})",
            "reading a pickle can run code hidden in it",
            "convert them where you trust them: load with transformers, then save_pretrained, which writes safetensors",
        )
    raise KvlatheError(f"{folder} has no weights", "it holds neither model.safetensors nor its index", DOWNLOAD)


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise KvlatheError(f"{index} cannot be read", str(error) or type(error).__name__, DOWNLOAD) from error
    for shard in shards:
        if Path(shard).name != shard:
            raise KvlatheError(f"{index} names the file {shard!r}", "weights lie in the checkpoint's own folder", DOWNLOAD)
        if not (index.parent / shard).is_file():
            raise KvlatheError(f"the weight file {index.parent / shard} is missing", f"{index.name} names it", DOWNLOAD)
    return tuple(index.parent / shard for shard in shards)


def _open(path: Path) -> Any:  # noqa: ANN401  safetensors gives its handles no public type
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise KvlatheError(f"{path} cannot be read", f"it is truncated or damaged ({error})", DOWNLOAD) from error


def _finite(tensor: torch.Tensor, name: str) -> torch.Tensor:
    low, high = torch.aminmax(tensor)  # both are NaN if any element is: one pass, no copy
    if not torch.isfinite(low + high):
        raise KvlatheError(f"the tensor {name} holds NaN or infinite numbers", "nothing sound can be computed from it", DOWNLOAD)
    return tensor


def _part(spec: DecoderSpec, role: str, stored: torch.Tensor) -> torch.Tensor:
    """This role's part of a tensor [..., out], with q and k put into canonical order."""
    if FUSED.get(role) in spec.family.names:
        stored = _unfused(spec, role, stored)
    if spec.rope and role in ("q", "k", "q_norm", "k_norm"):
        heads = stored.unflatten(-1, (-1, spec.head_dim))
        return heads[..., torch.tensor(spec.rope.order)].flatten(-2)
    return stored


def _unfused(spec: DecoderSpec, role: str, stored: torch.Tensor) -> torch.Tensor:
    if role in ("gate", "up"):
        return stored.chunk(2, dim=-1)[role == "up"]
    group, d = spec.group_size, spec.head_dim
    if spec.family.grouped_qkv:
        heads = stored.unflatten(-1, (spec.kv_heads, group + 2, d))
        return {"q": heads[..., :group, :], "k": heads[..., group, :], "v": heads[..., group + 1, :]}[role].flatten(
            -3 if role == "q" else -2
        )
    sizes = [spec.query_heads * d, spec.kv_heads * d, spec.kv_heads * d]
    return stored.split(sizes, dim=-1)["qkv".index(role)]


def _biased(spec: DecoderSpec) -> Mapping[str, bool]:
    f = spec.family
    qkv = dict.fromkeys(("q", "k", "v", "qkv"), f.qkv_bias)
    mlp = dict.fromkeys(("gate", "up", "gate_up", "down"), f.mlp_bias)
    return qkv | mlp | {"o": f.out_bias} | dict.fromkeys(NORMS, f.norm == "layer")


def _weights(spec: DecoderSpec) -> Iterator[str]:
    """Names of the decoder's tensors before folding."""
    names, biased = spec.family.names, _biased(spec)

    def kinds(prefix: str, role: str) -> Iterator[str]:
        if role in names or FUSED.get(role) in names:
            yield f"{prefix}{role}.weight"
            if biased.get(role):
                yield f"{prefix}{role}.bias"

    yield from kinds("", "embed")
    yield from kinds("", "positions")
    for layer in range(spec.layers):
        for role in LAYER_ROLES:
            yield from kinds(f"layers.{layer}.", role)
    yield from kinds("", "norm")
    if not spec.tied_head:
        yield from kinds("", "head")


def _with_real_head(checkpoint: Checkpoint) -> DecoderSpec:
    """As transformers does: a head stored beside an embedding that differs from it is not tied, whatever config.json says."""
    spec, names = checkpoint.spec, checkpoint.spec.family.names
    head = f"{names['head']}.weight"
    if not spec.tied_head or head not in checkpoint.names or checkpoint.shape(f"{names['embed']}.weight") is None:
        return spec
    same = torch.equal(checkpoint._raw(head), checkpoint._raw(f"{names['embed']}.weight"))
    return spec if same else dataclasses.replace(spec, tied_head=False)


def _stored_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the folder must hold, with its shape."""
    names, biased, d = spec.family.names, _biased(spec), spec.head_dim
    hidden, inner, q, kv = spec.hidden_size, spec.family.intermediate_size, spec.query_heads * d, spec.kv_heads * d
    linear = {
        "q": (hidden, q),
        "k": (hidden, kv),
        "v": (hidden, kv),
        "qkv": (hidden, q + 2 * kv),
        "o": (q, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }
    other = {"embed": (spec.vocab_size, hidden), "positions": (spec.max_positions, hidden), "head": (spec.vocab_size, hidden)}
    vectors = dict.fromkeys(NORMS, (hidden,)) | {"q_norm": (d,), "k_norm": (d,)}
    shapes: dict[str, tuple[int, ...]] = {}
    for role, name in names.items():
        if role == "head" and spec.tied_head:
            continue
        weight = other.get(role) or vectors.get(role) or (linear[role] if spec.family.in_out else linear[role][::-1])
        for layer in range(spec.layers) if "{i}" in name else (0,):
            at = name.replace("{i}", str(layer))
            shapes[f"{at}.weight"] = weight
            if biased.get(role):
                shapes[f"{at}.bias"] = (linear[role][1],) if role in linear else weight
    return shapes


def _check(checkpoint: Checkpoint) -> None:
    wanted = _stored_shapes(checkpoint.spec)
    for name, shape in wanted.items():
        found = checkpoint.shape(name)
        if found is None:
            raise KvlatheError(f"{checkpoint.path} lacks the tensor {name}", "the decoder needs it", DOWNLOAD)
        if found != shape:
            raise KvlatheError(
                f"the tensor {name} has shape {list(found)}", f"config.json makes it {list(shape)}", "check that the two belong together"
            )
    known = {checkpoint._resolve(name) for name in wanted}
    for name in checkpoint.names:
        _check_stored(checkpoint, name, known)


def _check_stored(checkpoint: Checkpoint, name: str, known: set[str]) -> None:
    if INERT.search(name) or name == f"{checkpoint.spec.family.names['head']}.weight":
        return
    if name not in known:
        raise KvlatheError(
            f"the checkpoint holds the tensor {name}",
            f"a {checkpoint.spec.model_type} model with this config.json has no such weight and leaving it out could change the result",
            "check that config.json belongs to the weights",
        )
    dtype = checkpoint._where[name].get_slice(name).get_dtype()
    if dtype not in DTYPES:
        raise KvlatheError(f"the tensor {name} is stored as {dtype}", f"only {', '.join(sorted(DTYPES))} are read", "convert it")
