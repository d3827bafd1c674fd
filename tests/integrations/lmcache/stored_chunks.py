"""A program for an environment with LMCache: chunks pass the serde as an L2 adapter calls it.
Prints "as it was", or fails. ``test_serde.py`` runs it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import (
    FSL2Adapter,
    FSL2AdapterConfig,
)
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
from lmcache.v1.memory_management import (
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
)

from kvlathe_lmcache.serde import register

Result = TypeVar("Result")
ERRORS = {16: 0.0, 8: 0.01, 4: 0.13, 3: 0.28, 2: 0.62}
"""The largest error of each number of bits, of normal numbers, relative."""
PARTS = {16: 0.9, 8: 0.54, 4: 0.29, 3: 0.23, 2: 0.17}
"""The largest part of 16 bits that is stored."""
KEY = ObjectKey(b"0" * 32, "model", 0)


def held(tensor: torch.Tensor, form: MemoryFormat) -> TensorMemoryObj:
    raw = tensor.view(torch.uint8).flatten()
    about = MemoryObjMetadata(
        shape=tensor.shape, dtype=tensor.dtype, address=0, phy_size=raw.numel(),
        ref_count=1, fmt=form, shapes=[tensor.shape], dtypes=[tensor.dtype],
    )  # fmt: skip
    return TensorMemoryObj(raw, about, None)


def awaited(query: Callable[[], Result | None]) -> Result:
    for _ in range(3000):
        if (done := query()) is not None:
            return done
        time.sleep(0.01)
    raise TimeoutError("LMCache does not answer")


def through_files(stored: TensorMemoryObj, loaded: TensorMemoryObj, folder: str) -> int:
    """Stores a buffer by LMCache's adapter of files and loads it into another one;
    returns the bytes of the file."""
    adapter = FSL2Adapter(FSL2AdapterConfig.from_dict({"base_path": folder}))
    task = adapter.submit_store_task([KEY], [stored])
    results = awaited(lambda: adapter.pop_completed_store_tasks() or None)
    assert results[task].is_successful(), "the file was not written"
    task = adapter.submit_load_task([KEY], [loaded])
    found = awaited(lambda: adapter.query_load_result(task))
    assert found.popcount() == 1, "the file was not read"
    adapter.close()
    [file] = [path for path in Path(folder).rglob("*") if path.is_file()]
    return file.stat().st_size


def passed(chunk: torch.Tensor, bits: int, cold: bool) -> tuple[int, torch.Tensor]:
    """Bytes that are stored, and the chunk that comes back: by the options of an
    adapter, LMCache's own processor, and a file. Files hold chunks of one size."""
    options: dict[str, object] = {"bits": bits, "cold": cold}
    if chunk.ndim == 3:
        options["head_dim"] = 64
    serde = create_serde_processor(SerdeConfig("kvlathe", options))
    layout = MemoryLayoutDesc([chunk.shape], [chunk.dtype])
    room = serde.estimate_serialized_size(layout)
    source = held(chunk, MemoryFormat.KV_2LTD)
    target = held(torch.zeros_like(chunk), MemoryFormat.KV_2LTD)
    stored = held(torch.zeros(room, dtype=torch.uint8), MemoryFormat.BINARY_BUFFER)
    loaded = held(torch.full((room,), 7, dtype=torch.uint8), MemoryFormat.BINARY_BUFFER)
    task = serde.submit_serialize([source], [stored], [KEY])
    assert awaited(lambda: serde.query_serialize_result(task))
    size = stored.get_size()
    if cold:
        loaded.raw_data[:size] = stored.raw_data[:size]
    else:
        with tempfile.TemporaryDirectory() as folder:
            assert size == room == through_files(stored, loaded, folder)
    task = serde.submit_deserialize([loaded], [target], [KEY])
    assert awaited(lambda: serde.query_deserialize_result(task)), "it was not read"
    if chunk.ndim == 3:
        other = create_serde_processor(
            SerdeConfig("kvlathe", {**options, "head_dim": 128})
        )
        task = other.submit_deserialize([loaded], [target], [KEY])
        assert not awaited(lambda: other.query_deserialize_result(task)), "wrong heads"
        other.close()
    loaded.raw_data[:8] = 0
    task = serde.submit_deserialize([loaded], [target], [KEY])
    assert not awaited(lambda: serde.query_deserialize_result(task)), "wrong bytes"
    serde.close()
    assert target.tensor is not None
    return size, target.tensor


def main() -> None:
    """Chunks of either dtype, whole pages and not."""
    register()
    register()  # twice is once
    rng = torch.Generator().manual_seed(0)
    for dtype, shape in (
        (torch.float16, (2, 3, 256, 128)),
        (torch.bfloat16, (2, 3, 200, 128)),
        (torch.bfloat16, (3, 256, 256)),
    ):
        tokens = shape[-2]
        chunk = torch.randn(shape, generator=rng).to(dtype)
        for bits, cold in [
            *((bits, True) for bits in ERRORS),
            (8, False),
            (4, False),
            (3, False),
            (2, False),
        ]:
            size, back = passed(chunk, bits, cold)
            error = (back.float() - chunk.float()).norm() / chunk.float().norm()
            assert error <= ERRORS[bits], f"{dtype}, {bits} bits: error {error}"
            share = size / 2 / chunk.numel()
            assert tokens % 64 or share <= PARTS[bits], f"{bits} bits: {share} stored"
    print("as it was")


if __name__ == "__main__":
    main()
