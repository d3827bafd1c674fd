"""LMCache's serde "kvlathe": what an L2 adapter stores of a chunk.

    {"type": "fs", "base_path": "/cache", "serde": {"type": "kvlathe", "bits": 4}}

The interface is that of LMCache 0.5.6 (lmcache/v1/distributed/serde/base.py). Its adapters of
files and of Valkey read back what fills the buffer that was estimated, and no less. So chunks
have one size, unless ``cold`` is asked for. A chunk is one
tensor of float16 or bfloat16, [2, layers, tokens, hidden], or [layers, tokens, heads * 2 * d]
(sides.py); with 16 bits also [1, layers, tokens, hidden], of heads that share a latent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj

from kvlathe.base.errors import KvlatheError
from kvlathe_lmcache.codec import ChunkCodec, ChunkForm, check_options
from kvlathe_lmcache.sides import Words, apart, joined, shape_apart

NAME = "kvlathe"
DEFAULT_BITS = 8
BRAIN = {torch.float16: False, torch.bfloat16: True}


class Codecs:
    """One codec for each form of chunk, made once. ``head_dim``: as in sides.py."""

    def __init__(self, bits: int, cold: bool, head_dim: int | None) -> None:
        self.bits = bits
        self.cold = cold
        self.head_dim = head_dim
        self._made: dict[ChunkForm, ChunkCodec] = {}
        self._lock = Lock()

    def of(self, shape: Sequence[int], dtype: torch.dtype) -> ChunkCodec:
        """Raises KvlatheError for chunks that are not coded."""
        if len(shape) not in (3, 4) or dtype not in BRAIN:
            raise KvlatheError(
                f"a chunk of {tuple(shape)} {dtype} was sent",
                "chunks are [2, layers, tokens, hidden] or [layers, tokens, heads * 2 * "
                "head_dim], of float16 or bfloat16",
                "use another serde for this model",
            )
        if len(shape) == 3 and self.bits < 16 and self.head_dim is None:
            raise KvlatheError(
                f"a chunk of {tuple(shape)} was sent",
                "K and V of a head lie side by side, and are coded apart",
                'add "head_dim" to the serde: numbers of K of a head',
            )
        head_dim = self.head_dim if len(shape) == 3 else None
        form = ChunkForm(*shape_apart(shape, head_dim), BRAIN[dtype], head_dim)
        with self._lock:
            if form not in self._made:
                self._made[form] = ChunkCodec(form, self.bits, self.cold)
            return self._made[form]


class KvlatheSerializer(Serializer):
    """K and V in ``bits`` bits; ``cold``: then coded without loss."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Writes the chunk of ``src`` to ``dst``; returns how many bytes. ``key`` is
        not needed."""
        chunk = _tensor(src)
        codec = self._codecs.of(chunk.shape, chunk.dtype)
        data = codec.encode(apart(_words(chunk), self._codecs.head_dim))
        out = _tensor(dst).flatten().view(torch.uint8)
        if len(data) > out.numel():
            raise KvlatheError(
                f"a chunk takes {len(data):,} bytes",
                f"its buffer has {out.numel():,}",
                "report this",
            )
        out[: len(data)].copy_(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))
        return len(data)

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Bytes that every chunk of a layout fits into."""
        if len(layout_desc.shapes) != 1:
            raise KvlatheError(
                f"a chunk has {len(layout_desc.shapes)} tensors",
                "one is coded",
                "use another serde for this model",
            )
        return self._codecs.of(layout_desc.shapes[0], layout_desc.dtypes[0]).bound


class KvlatheDeserializer(Deserializer):
    """The chunk again; with fewer than 16 bits, what its codes stand for."""

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Fills ``dst``. ``src`` may go on past the chunk's bytes. Raises KvlatheError
        for bytes of another form, or damaged ones."""
        chunk = _tensor(dst)
        data = bytes(src.byte_array)
        sides = self._codecs.of(chunk.shape, chunk.dtype).decode(data)
        words = joined(sides, chunk.shape, self._codecs.head_dim)
        chunk.copy_(torch.from_numpy(words.view(np.int16)).view(chunk.dtype))


def _tensor(of: MemoryObj) -> torch.Tensor:
    if of.tensor is None:
        raise KvlatheError("a chunk has no tensor", "it was released", "report this")
    return of.tensor


def _words(chunk: torch.Tensor) -> Words:
    plain = chunk.detach().cpu().contiguous()
    return plain.view(torch.int16).numpy().view(np.uint16)


def make(options: Mapping[str, object]) -> SerdeProcessor:
    """The serde of an adapter's options: ``bits`` (16, 8, 4, 3, 2), ``cold``,
    ``head_dim`` and ``max_workers``. Raises KvlatheError for others, and where there is no native
    library."""
    unknown = set(options) - {"bits", "cold", "head_dim", "max_workers"}
    if unknown:
        raise KvlatheError(
            f"the serde has no option {', '.join(sorted(unknown))}",
            "there are bits, cold, head_dim and max_workers",
            "leave it out",
        )
    bits = _count(options, "bits", DEFAULT_BITS)
    cold = options.get("cold", False)
    if not isinstance(cold, bool):
        raise KvlatheError(f"cold is {cold!r}", "it is true or false", "mend the JSON")
    check_options(bits, cold)
    head_dim = _count(options, "head_dim", 1) if "head_dim" in options else None
    codecs = Codecs(bits, cold, head_dim)
    return AsyncSerdeProcessor(
        KvlatheSerializer(codecs),
        KvlatheDeserializer(codecs),
        max_workers=_count(options, "max_workers", 1),
    )


def _count(options: Mapping[str, object], name: str, default: int) -> int:
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise KvlatheError(
            f"{name} is {value!r}", "it is a positive number", "mend the adapter's JSON"
        )
    return value


def register() -> None:
    """Makes the serde known to this process, once."""
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, make)
