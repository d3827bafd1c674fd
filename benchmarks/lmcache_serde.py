"""Serdes of LMCache on the K and V of a model: bytes, seconds, and what they lose.

    PYTHONPATH=.:integrations/lmcache .lmcache/bin/python -m benchmarks.lmcache_serde --model DIR

The first tokens of a text of ``data/eval_text.jsonl`` go through the model of transformers. Their
K and V pass each serde in chunks of 256 tokens, as LMCache stores them. The next tokens are then
scored behind them: KL is of the next token's probabilities, behind K and V as they were and as
they came back. "kvlathe": ours (integrations/lmcache), with its bits, plain and cold; "cachegen" and "fp8" are
LMCache's own. Seconds are of one thread. One table and one JSON line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import (
    Deserializer,
    Fp8QuantizationDeserializer,
    Fp8QuantizationSerializer,
    Serializer,
)
from lmcache.v1.memory_management import (
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
)
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.naive_serde import CreateSerde
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.support.commands import DATA
from benchmarks.support.options import one_model, table_and_json
from kvlathe.tasks import tasks
from kvlathe_lmcache.serde import Codecs, KvlatheDeserializer, KvlatheSerializer

CHUNK = 256
COLUMNS = ("serde", "of 16 bits", "ratio", "serialize GB/s", "deserialize GB/s", "KL", "same token")  # fmt: skip
KEY = ObjectKey(b"0" * 32, "model", 0)
Passed = tuple[int, float, float, torch.Tensor]
"""Bytes, seconds to serialize and to deserialize, and the chunk that came back."""


def held(tensor: torch.Tensor, form: MemoryFormat) -> TensorMemoryObj:
    """A tensor as LMCache's allocator hands it over."""
    raw = tensor.contiguous().view(torch.uint8).flatten()
    about = MemoryObjMetadata(
        shape=tensor.shape, dtype=tensor.dtype, address=0, phy_size=raw.numel(),
        ref_count=1, fmt=form, shapes=[tensor.shape], dtypes=[tensor.dtype],
    )  # fmt: skip
    return TensorMemoryObj(raw, about, None)


def by_interface(
    serializer: Serializer, deserializer: Deserializer
) -> Callable[[torch.Tensor], Passed]:
    """A serde of an L2 adapter."""

    def passed(chunk: torch.Tensor) -> Passed:
        layout = MemoryLayoutDesc([chunk.shape], [chunk.dtype])
        room = serializer.estimate_serialized_size(layout)
        source = held(chunk, MemoryFormat.KV_2LTD)
        stored = held(torch.zeros(room, dtype=torch.uint8), MemoryFormat.BINARY_BUFFER)
        target = held(torch.zeros_like(chunk), MemoryFormat.KV_2LTD)
        started = time.perf_counter()
        size = serializer.serialize(source, stored, KEY)
        between = time.perf_counter()
        deserializer.deserialize(stored, target, KEY)
        ended = time.perf_counter()
        assert target.tensor is not None
        return size, between - started, ended - between, target.tensor

    return passed


def cachegen(
    model: Path, shape: torch.Size, heads: int
) -> Callable[[torch.Tensor], Passed]:
    """LMCache's CacheGen, which is no serde of an L2 adapter."""
    _, layers, _, hidden = shape
    metadata = LMCacheMetadata(
        model_name=str(model), world_size=1, local_world_size=1, worker_id=0,
        local_worker_id=0, kv_dtype=torch.float16,
        kv_shape=(layers, 2, CHUNK, heads, hidden // heads),
    )  # fmt: skip
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK)
    serializer, deserializer = CreateSerde("cachegen", metadata, config)

    def passed(chunk: torch.Tensor) -> Passed:
        started = time.perf_counter()
        stored = serializer.serialize(held(chunk, MemoryFormat.KV_2LTD))
        between = time.perf_counter()
        back = deserializer.deserialize(stored)
        ended = time.perf_counter()
        size = len(stored.byte_array)
        assert back.tensor is not None
        return (
            size,
            between - started,
            ended - between,
            back.tensor.reshape(chunk.shape),
        )

    return passed


class Scored:
    """A model, a text, and what the model says of it."""

    def __init__(self, folder: Path, prompt: int, scored: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = tasks.read_texts(DATA / "eval_text.jsonl")
        ids: list[int] = []
        for text in texts:
            ids += tokenizer(text)["input_ids"]
        self.prompt = torch.tensor([ids[:prompt]])
        self.next = torch.tensor([ids[prompt : prompt + scored]])
        with torch.no_grad():
            cache = self.model(self.prompt, use_cache=True).past_key_values
        sides = [
            torch.stack([getattr(layer, side)[0] for layer in cache.layers])
            for side in ("keys", "values")
        ]
        self.heads = sides[0].shape[1]
        both = torch.stack(sides).transpose(2, 3)  # [2, layers, tokens, heads, dim]
        self.kv = both.flatten(-2).to(torch.float16)
        self.expected = self.behind(self.kv)

    def behind(self, kv: torch.Tensor) -> torch.Tensor:
        """log-probabilities [scored, vocabulary] behind a prompt of these K and V."""
        cache = DynamicCache()
        split = kv.float().unflatten(-1, (self.heads, -1)).transpose(2, 3)
        for layer, (key, value) in enumerate(zip(*split, strict=True)):
            cache.update(key[None], value[None], layer)
        with torch.no_grad():
            logits = self.model(self.next, past_key_values=cache).logits[0]
        return logits.log_softmax(-1)


def row(
    name: str, passed: Callable[[torch.Tensor], Passed], scored: Scored
) -> dict[str, Any]:
    chunks = [*scored.kv.split(CHUNK, dim=2)]
    passed(chunks[0])  # the first is slower
    found = [passed(chunk) for chunk in chunks]
    size, serializing, deserializing = (sum(one[i] for one in found) for i in range(3))
    whole = 2 * scored.kv.numel()
    other = scored.behind(torch.cat([one[3] for one in found], dim=2))
    kl = (scored.expected.exp() * (scored.expected - other)).sum(-1).mean()
    same = (scored.expected.argmax(-1) == other.argmax(-1)).float().mean()
    return {
        "serde": name,
        "of 16 bits": size / whole,
        "ratio": whole / size,
        "serialize GB/s": whole / serializing / 1e9,
        "deserialize GB/s": whole / deserializing / 1e9,
        "KL": float(kl),
        "same token": float(same),
    }  # fmt: skip


def rows(folder: Path, scored: Scored) -> Iterator[dict[str, Any]]:
    for bits in (16, 8, 4, 3, 2):
        for cold in (False, True)[bits == 16 :]:
            codecs = Codecs(bits, cold, head_dim=None)
            serializer = KvlatheSerializer(codecs)
            ours = by_interface(serializer, KvlatheDeserializer(codecs))
            name = f"kvlathe, {bits} bits{', cold' if cold else ''}"
            yield row(name, ours, scored)
    fp8 = by_interface(Fp8QuantizationSerializer(), Fp8QuantizationDeserializer())
    yield row("fp8", fp8, scored)
    yield row("cachegen", cachegen(folder, scored.kv.shape, scored.heads), scored)


@click.command()
@one_model
@click.option("--prompt", default=1024, show_default=True, help="Tokens stored.")
@click.option("--scored", default=256, show_default=True, help="Tokens behind them.")
def main(model: Path, prompt: int, scored: int) -> None:
    """Measure serdes of LMCache on a model's K and V."""
    torch.set_num_threads(1)
    found = [*rows(model, Scored(model, prompt, scored))]
    title = f"{model.name}: {prompt} tokens in chunks of {CHUNK}"
    table_and_json("lmcache_serde", title, COLUMNS, found, model=model.name)


if __name__ == "__main__":
    main()
