"""The session that runs an engine in this process, how much cache it may have, and what
runs its attention, in words.

What runs a backend is data: RUNNERS. Engines of the onnxruntime backend run on the CPU,
or on GPU 0 where their manifest names GPUs (float16, and a plan that the CUDA kernels
take) and everything for it is there. KVLATHE_DEVICE=cpu|cuda, or ``device``, decides
instead.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Protocol

from kvlathe.base import devices, machine
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.base.memory import LESS_MEMORY, OutOfMemory, within_memory
from kvlathe.base.tensorrt_library import FLAVOURS
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits, Manifest
from kvlathe.plan.memory import memory_table, states_room
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native import library as native
from kvlathe.runtime.sessions.gpu import cuda_python as gpu
from kvlathe.runtime.sessions.gpu import side_memory
from kvlathe.runtime.sessions.gpu import tensorrt as trt_session
from kvlathe.runtime.sessions.host import native as native_session
from kvlathe.runtime.sessions.protocols import Session

log = logging.getLogger("kvlathe")


class SessionFactory(Protocol):
    """Loads an engine folder with a cache of so many bytes. ``threads``: on a CPU;
    None: one a core. Raises KvlatheError where that cannot be."""

    def __call__(
        self,
        folder: Path,
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
        threads: int | None = None,
    ) -> Session: ...


@dataclass(frozen=True)
class Runner:
    """The way in which a backend's engines run on ``device``.

    ``session``: what loads the engine; raises KvlatheError where nothing does.
    ``attention``: what runs kvlathe::Attend, in words. ``prompt_tokens``: prompt tokens
    beside running answers in one step, by default. ``memory``: bytes of a GPU that are
    free, and all; None: the host's memory is used. ``copies``: how often weights are
    there while they are loaded; of several GPUs, on the fullest. ``beside``: bytes that
    a session keeps there beside weights and cache, of a plan, its limits and all bytes.
    """

    device: str
    session: Callable[[Manifest], SessionFactory]
    attention: Callable[[Manifest], str]
    prompt_tokens: int
    memory: Callable[[], tuple[int, int]] | None = None
    copies: float = 1
    beside: Callable[[CompressionPlan, Limits, int], int] | None = None


# -- the CPU ---------------------------------------------------------------------------


def _host_session(manifest: Manifest) -> SessionFactory:
    """Warns where an engine that gains by them runs without the native kernels."""
    if manifest.compute_dtype in native_session.SESSIONS and native.find().reason:
        log.warning(
            "This engine runs without the native kernels, much slower: %s.",
            native.find().reason.rstrip("."),
        )
    return native_session.session_class(manifest)


def _host_attention(manifest: Manifest) -> str:
    """An engine that is made for GPUs too says why it is not on one."""
    words = native_session.attention(manifest)
    if not _made_for_gpus(manifest):
        return words
    asked = f"{devices.VARIABLE} or --device asks for the CPU"
    return f"{words}; on the CPU, NOT on a GPU: {_ort_obstacle(manifest) or asked}"


# -- torch on a GPU --------------------------------------------------------------------


def _torch_session(manifest: Manifest) -> SessionFactory:
    if util.find_spec("torch") is None:
        raise KvlatheError(
            "the cuda backend needs torch",
            "it is missing",
            f"run {pip_install('export')}",
        )
    from kvlathe.runtime.sessions.torch_cuda.compute import open_session

    return open_session


def _torch_memory() -> tuple[int, int]:
    from kvlathe.runtime.sessions.torch_cuda.device import memory_bytes

    return memory_bytes()


def _torch_side(plan: CompressionPlan, limits: Limits, total: int) -> int:
    here = native.find().native
    tiles = here is not None and here.cuda and here.lib.kvlathe_cuda_has_prompt_kernel()
    return side_memory.side_bytes(plan, limits, total, bool(tiles))


def _torch_attention(manifest: Manifest) -> str:
    obstacle = _no_kernels() or ("" if _has_gpu() else "the driver sees no GPU")
    return _kernels(obstacle, "native CUDA kernels, decode steps as CUDA graphs")


def _has_gpu() -> bool:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return False
    except OSError:
        return False
    return count.value > 0


def backend_here(device: str | None = None) -> str:
    """The backend of engines that are built to run here, on ``device``: cuda where a GPU
    and its kernels are, else onnxruntime."""
    can = _has_gpu() and util.find_spec("torch") is not None and not _no_kernels()
    return "cuda" if can and devices.requested(device) != "cpu" else "onnxruntime"


# -- ONNX Runtime and TensorRT on a GPU ------------------------------------------------


def _ort_session(manifest: Manifest) -> SessionFactory:
    """Asked only where nothing is in its way."""
    from kvlathe.runtime.sessions.gpu.onnx import open_session

    return open_session


def _ort_obstacle(manifest: Manifest) -> str:
    """Why an engine of the onnxruntime backend cannot run on a GPU here; empty if it
    can."""
    from kvlathe.runtime.sessions.gpu import onnx as ort_session

    if not _made_for_gpus(manifest):
        return (
            "it was built for the CPU: GPUs take --dtype float16 and pages that the "
            "CUDA kernels attend"
        )
    return _no_gpu(manifest) or ort_session.obstacle() or _no_kernels()


def _ort_attention(manifest: Manifest) -> str:
    words = "native CUDA kernels in ONNX Runtime's CUDA provider, on the GPU"
    return _kernels(_ort_obstacle(manifest), words)


def _trt_session(manifest: Manifest) -> SessionFactory:
    if reason := _trt_obstacle(manifest):
        raise KvlatheError(
            f"the engine was built for {manifest.backend} and cannot run here",
            reason,
            "mend that, or build it with --backend cuda or onnxruntime",
        )
    return trt_session.open_session


def _trt_obstacle(manifest: Manifest) -> str:
    return trt_session.obstacle(manifest) or _no_gpu(manifest) or _no_kernels()


def _trt_attention(manifest: Manifest) -> str:
    words = "the TensorRT plugin, decode steps as CUDA graphs"
    return _kernels(_trt_obstacle(manifest), words)


# -- what is here ----------------------------------------------------------------------


def _made_for_gpus(manifest: Manifest) -> bool:
    return any(name.startswith("sm_") for name in manifest.architectures)


def _no_gpu(manifest: Manifest) -> str:
    """Why there is no GPU here that an engine was made for; empty if there is one."""
    if reason := gpu.obstacle():
        return reason
    here, made_for = gpu.architecture(), manifest.architectures
    if here in made_for:
        return ""
    return f"this GPU is {here} and the engine was built for {', '.join(made_for)}"


def _no_kernels() -> str:
    """Why the native library has no CUDA kernels; empty if it has."""
    here = native.find()
    if here.native is None:
        return here.reason
    if here.native.cuda:
        return ""
    return (
        f"{here.native.path} holds no CUDA kernels; kvlathe native --cuda builds them"
    )


def _kernels(obstacle: str, words: str) -> str:
    here = native.find()
    if obstacle or here.native is None:
        return f"it will NOT run here: {obstacle}"
    return f"{words} ({here.native.path})"


PROMPT_TOKENS = {"cpu": 512, "cuda": 8192}
"""A step takes about as long as its prompt tokens: half a second for 512 on two cores,
a quarter of a second for 8,192 of an 8B model on an H200. Running answers wait for
it."""

ON_CPU = Runner("cpu", _host_session, _host_attention, PROMPT_TOKENS["cpu"])
ON_GPU = Runner(
    "cuda", _ort_session, _ort_attention, PROMPT_TOKENS["cuda"], gpu.memory_bytes, 2
)
ON_TORCH = Runner(
    "cuda",
    _torch_session,
    _torch_attention,
    PROMPT_TOKENS["cuda"],
    _torch_memory,
    beside=_torch_side,
)
ON_TENSORRT = Runner(
    "cuda", _trt_session, _trt_attention, PROMPT_TOKENS["cuda"], gpu.memory_bytes, 2
)
RUNNERS: Mapping[str, Runner] = {
    "onnxruntime": ON_CPU,
    "cuda": ON_TORCH,
    **dict.fromkeys(FLAVOURS, ON_TENSORRT),
}


def runner(
    manifest: Manifest, name: object = "this engine", device: str | None = None
) -> Runner:
    """The runner of engine ``name`` on ``device``.

    ``device`` None: what KVLATHE_DEVICE says, or else auto: what suits the engine.
    Raises KvlatheError where nothing here runs it.
    """
    wanted = devices.requested(device)
    if manifest.backend not in RUNNERS:
        raise KvlatheError(
            f"the engine {name} was built for {manifest.backend}",
            f"this runtime runs {', '.join(RUNNERS)}",
            "build it with another --backend",
        )
    chosen = RUNNERS[manifest.backend]
    if chosen is ON_CPU and wanted != "cpu":
        chosen = _cpu_or_gpu(manifest, name, wanted)
    if wanted not in ("auto", chosen.device):
        raise KvlatheError(
            f"{name} was built for {manifest.backend}, which runs on a GPU",
            f"--device is {wanted}",
            "build it for onnxruntime",
        )
    return chosen


def _cpu_or_gpu(manifest: Manifest, name: object, wanted: str) -> Runner:
    """The runner of an engine that has a choice."""
    obstacle = _ort_obstacle(manifest)
    if wanted == "cuda" and obstacle:
        raise KvlatheError(
            f"{name} cannot run on the GPU",
            obstacle,
            "mend that, or run it with --device cpu",
        )
    return ON_CPU if obstacle else ON_GPU


def loaded(
    work: Callable[[], Session], name: object, weights: int, cache: int
) -> Session:
    """The session that ``work`` loads of engine ``name``. Raises OutOfMemory that says
    how many bytes it would need."""
    fact = (
        f"{name} finds no memory for its {weights:,} bytes of weights and "
        f"{cache:,} bytes of cache"
    )
    return within_memory(work, fact, LESS_MEMORY)


def attention(manifest: Manifest, device: str | None = None) -> str:
    """The code that runs kvlathe::Attend of this engine in this process, and if it is
    not the native library, why."""
    return runner(manifest, device=device).attention(manifest)


def cache_bytes(
    manifest: Manifest,
    layout: CacheLayout,
    chosen: Runner,
    share: float = devices.GPU_MEMORY_UTILIZATION,
    asked: int | None = None,
) -> int:
    """Bytes of the cache: those ``asked`` for, or room for a full batch of the longest
    sequences, two of them in the moment that their prompts need most; at most what the
    memory there allows.

    ``share``: of a GPU's memory, that this engine takes: weights, cache, and what a
    session keeps beside them. What other processes hold does not count.
    Raises OutOfMemory, before anything is loaded, where weights and cache cannot fit.
    """
    limits: Limits = manifest.limits
    longest = memory_table(layout, limits.max_seq_len, limits.max_batch_size)[-1]
    border = 2 * len(layout.page_stride) * max(layout.page_stride)
    full = longest["batch_steady"] + limits.max_batch_size * border
    full += 2 * (longest["peak"] - longest["steady"])
    full += states_room(layout, limits.max_batch_size)
    if chosen.memory is None:
        return asked or min(full, machine.memory_bytes() // 2)
    free, total = chosen.memory()
    # What stays free is for what steps compute and for CUDA graphs.
    stays = min(1 - share, 1 - devices.GPU_MEMORY_UTILIZATION)
    granted = int(total * share)
    usable = free if asked else min(granted, free - int(total * stays))
    weights = int(chosen.copies * manifest.size)
    beside = chosen.beside(layout.plan, limits, total) if chosen.beside else 0
    left = usable - weights - beside
    if left >= (asked or border):
        return asked or min(full, left)
    cache = f"{asked:,} bytes" if asked else f"at least {border:,} bytes"
    tokens, one = limits.max_seq_len, longest["peak"]
    sequence = f"one sequence of {tokens:,} tokens takes {one:,}"
    wanted = math.ceil(100 * (weights + beside + border) / total) / 100
    remedy = (
        "end what else runs there, start each with a smaller --gpu-memory-utilization, "
        "or ask for less --cache-size"
    )
    if not asked and wanted > share and wanted * total <= free - int(total * stays):
        remedy = f"give it --gpu-memory-utilization {wanted:.2f} or more"
    given = "" if asked else f", of which this engine may take {granted:,}"
    raise OutOfMemory(
        "the GPU has no room for this engine",
        f"{free:,} of its {total:,} bytes are free{given}; "
        f"loading the weights takes {weights:,}, steps take {beside:,}, a cache {cache} "
        f"({sequence})",
        remedy,
    )
