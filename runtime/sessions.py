"""Which session runs an engine in this process, how much cache it may have, and what runs its attention, in words.

Engines of the onnxruntime backend run on the CPU, or on GPU 0: those in float16 whose plan the CUDA kernels take
(their manifest names GPUs), where everything for it is there. KVLATHE_DEVICE=cpu|cuda, or ``device``, decides instead.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import util
from typing import Any

from kvlathe.engines.manifest import Limits, Manifest
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.runtime import device as gpu
from kvlathe.runtime import machine, native, native_session, trt_session
from kvlathe.tensorrt_library import FLAVOURS

DEVICES = ("auto", "cpu", "cuda")
VARIABLE = "KVLATHE_DEVICE"


@dataclass(frozen=True)
class Runner:
    """How a backend's engines run on a device. ``session`` chooses the class and raises KvlatheError where there is
    none, ``room`` is the most bytes of cache there is then memory for, given an engine that is not loaded yet,
    ``attention`` says what runs kvlathe::Attend."""

    device: str
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
    obstacle = _no_kernels() or ("" if _has_gpu() else "the driver sees no GPU")
    return _kernels(obstacle, "native CUDA kernels, decode steps as CUDA graphs")


def _kernels(obstacle: str, words: str) -> str:
    found = native.find().native
    return f"it will NOT run here: {obstacle}" if obstacle or found is None else f"{words} ({found.path})"


def _no_kernels() -> str:
    """Why the native library has no CUDA kernels; empty if it has."""
    found = native.find()
    if found.native is None:
        return found.reason
    return "" if found.native.cuda else f"{found.native.path} holds no CUDA kernels; kvlathe native --cuda builds them"


def _has_gpu() -> bool:
    try:
        cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except OSError:
        return False


def _host_room(manifest: Manifest) -> int:
    return machine.memory_bytes() // 2


# -- ONNX Runtime and TensorRT on a GPU --------------------------------------------------------------------------------


def _ort_session(manifest: Manifest) -> Any:  # noqa: ANN401
    from kvlathe.runtime.ort_device_session import OrtDeviceSession

    return OrtDeviceSession  # chosen only where nothing is in its way


def _ort_obstacle(manifest: Manifest) -> str:
    """Why an engine of the onnxruntime backend cannot run on a GPU here; empty if it can."""
    from kvlathe.runtime import ort_device_session

    if not any(name.startswith("sm_") for name in manifest.architectures):
        return "it was built for the CPU: GPUs take --dtype float16 and pages that the CUDA kernels attend"
    return _no_gpu(manifest) or ort_device_session.obstacle() or _no_kernels()


def _no_gpu(manifest: Manifest) -> str:
    """Why there is no GPU here that an engine was made for; empty if there is one."""
    if found := gpu.obstacle():
        return found
    mine, made = gpu.architecture(), manifest.architectures
    return "" if mine in made else f"this GPU is {mine} and the engine was built for {', '.join(made)}"


def _ort_attention(manifest: Manifest) -> str:
    return _kernels(_ort_obstacle(manifest), "native CUDA kernels in ONNX Runtime's CUDA provider, on the GPU")


def _host_attention(manifest: Manifest) -> str:
    """An engine that is made for GPUs too says why it is not on one."""
    words, made = native_session.attention(manifest), any(name.startswith("sm_") for name in manifest.architectures)
    asked = f"{VARIABLE} or --device asks for the CPU"
    return f"{words}; on the CPU, NOT on a GPU: {_ort_obstacle(manifest) or asked}" if made else words


def _trt_session(manifest: Manifest) -> Any:  # noqa: ANN401
    if found := _trt_obstacle(manifest):
        fact = f"the engine was built for {manifest.backend} and cannot run here"
        raise KvlatheError(fact, found, "mend that, or build it with --backend cuda or onnxruntime")
    return trt_session.TrtSession


def _trt_obstacle(manifest: Manifest) -> str:
    return trt_session.obstacle(manifest) or _no_gpu(manifest) or _no_kernels()


def _trt_attention(manifest: Manifest) -> str:
    return _kernels(_trt_obstacle(manifest), "the TensorRT plugin, decode steps as CUDA graphs")


def _gpu_room(manifest: Manifest) -> int:
    return max(0, gpu.free_bytes() - 2 * manifest.size) * 8 // 10


ON_CPU = Runner("cpu", native_session.session_class, _host_room, _host_attention)
ON_GPU = Runner("cuda", _ort_session, _gpu_room, _ort_attention)
RUNNERS: Mapping[str, Runner] = {
    "onnxruntime": ON_CPU,
    "cuda": Runner("cuda", _cuda_session, _cuda_room, _cuda_attention),
    **dict.fromkeys(FLAVOURS, Runner("cuda", _trt_session, _gpu_room, _trt_attention)),
}


def runner(manifest: Manifest, name: object = "this engine", device: str | None = None) -> Runner:
    """What runs engine ``name`` on ``device`` (None: what KVLATHE_DEVICE says, or else auto: what suits the engine).

    Raises KvlatheError where nothing here does.
    """
    wanted = device or os.environ.get(VARIABLE) or "auto"
    if wanted not in DEVICES:
        raise KvlatheError(f"there is no device {wanted!r}", "", f"choose one of {', '.join(DEVICES)}")
    if manifest.backend not in RUNNERS:
        raise KvlatheError(
            f"the engine {name} was built for {manifest.backend}",
            f"this runtime runs {', '.join(RUNNERS)}",
            "build it with another --backend",
        )
    chosen = RUNNERS[manifest.backend]
    if manifest.backend == "onnxruntime" and wanted != "cpu":
        obstacle = _ort_obstacle(manifest)
        if wanted == "cuda" and obstacle:
            raise KvlatheError(f"{name} cannot run on the GPU", obstacle, "mend that, or run it with --device cpu")
        chosen = ON_CPU if obstacle else ON_GPU
    if wanted not in ("auto", chosen.device):
        fact = f"{name} was built for {manifest.backend}, which runs on a GPU"
        raise KvlatheError(fact, f"--device is {wanted}", "build it for onnxruntime")
    return chosen


def attention(manifest: Manifest, device: str | None = None) -> str:
    """What runs kvlathe::Attend of this engine in this process, and if it is not the native library, why."""
    return runner(manifest, device=device).attention(manifest)


def cache_bytes(manifest: Manifest, layout: CacheLayout, chosen: Runner) -> int:
    """Room for a full batch of the longest sequences and, where prompts are ranked when they end, for two that have
    not; at most what the memory there is allows."""
    limits: Limits = manifest.limits
    pages = 2 * len(layout.page_stride) * max(layout.page_stride)
    full = limits.max_batch_size * (layout.bytes_for(limits.max_seq_len) + pages)
    full += 2 * layout.prompt_bytes(limits.max_seq_len) if layout.plan.ranked else 0
    return min(full, chosen.room(manifest))
