"""Which session runs an engine in this process, how much cache it may have, and what runs its attention, in words."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import util
from typing import Any

from kvlathe.engines.manifest import Limits, Manifest
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.runtime import machine, native, native_session


@dataclass(frozen=True)
class Runner:
    """How a backend's engines run. ``session`` chooses the class, ``room`` is the most bytes of cache there is memory
    for, given an engine that is not loaded yet, ``attention`` says what runs kvlathe::Attend."""

    session: Callable[[Manifest], Any]
    room: Callable[[Manifest], int]
    attention: Callable[[Manifest], str]


def _cuda_session(manifest: Manifest) -> Any:  # noqa: ANN401  a class that needs torch, which comes only now
    if util.find_spec("torch") is None:
        raise KvlatheError("the cuda backend needs torch", "it is missing", "pip install 'kvlathe[export]'")
    from kvlathe.runtime.cuda_session import CudaSession

    return CudaSession


def _cuda_room(manifest: Manifest) -> int:
    from kvlathe.runtime.cuda_session import free_bytes

    return max(0, free_bytes() - manifest.size) * 8 // 10


def _cuda_attention(manifest: Manifest) -> str:
    found = native.find()
    if found.native is None:
        return f"it will NOT run here: {found.reason}"
    if not found.native.cuda:
        return f"it will NOT run here: {found.native.path} holds no CUDA kernels; kvlathe native --cuda builds them"
    if not _has_gpu():
        return "it will NOT run here: the driver sees no GPU"
    return f"native CUDA kernels, decode steps as CUDA graphs ({found.native.path})"


def _has_gpu() -> bool:
    try:
        cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except OSError:
        return False


def _host_room(manifest: Manifest) -> int:
    return machine.memory_bytes() // 2


RUNNERS: Mapping[str, Runner] = {
    "onnxruntime": Runner(native_session.session_class, _host_room, native_session.attention),
    "cuda": Runner(_cuda_session, _cuda_room, _cuda_attention),
}


def runner(manifest: Manifest, name: object) -> Runner:
    """Raises KvlatheError where nothing here runs engine ``name``."""
    if manifest.backend not in RUNNERS:
        raise KvlatheError(
            f"the engine {name} was built for {manifest.backend}",
            f"this runtime runs {', '.join(RUNNERS)}",
            "build it with another --backend",
        )
    return RUNNERS[manifest.backend]


def attention(manifest: Manifest) -> str:
    """What runs kvlathe::Attend of this engine in this process, and if it is not the native library, why."""
    if manifest.backend not in RUNNERS:
        return f"not run here: {manifest.backend} engines need its own runtime"
    return RUNNERS[manifest.backend].attention(manifest)


def cache_bytes(manifest: Manifest, layout: CacheLayout) -> int:
    """Room for a full batch of the longest sequences and, where prompts are ranked when they end, for two that have
    not; at most what the memory there is allows."""
    limits: Limits = manifest.limits
    pages = 2 * len(layout.page_stride) * max(layout.page_stride)
    full = limits.max_batch_size * (layout.bytes_for(limits.max_seq_len) + pages)
    full += 2 * layout.prompt_bytes(limits.max_seq_len) if layout.plan.ranked else 0
    return min(full, RUNNERS[manifest.backend].room(manifest))
