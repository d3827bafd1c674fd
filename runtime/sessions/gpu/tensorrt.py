"""A TensorRT or TensorRT-RTX engine whose Attend nodes are our plugin. No torch.

Memory, stream and CUDA graphs are DeviceSession's. Here: the engine, an execution
context for each of its two profiles (engines/targets/tensorrt.py: decode steps, and any
mix of chunks and decodes), and where their tensors are. The plugin reads and extends
the pool in place, so the pool is an input like any other.
"""

from __future__ import annotations

from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.base.memory import OutOfMemory
from kvlathe.base.tensorrt_library import FLAVOURS, PLUGIN, find_plugin, logger_of
from kvlathe.plan import manifest as manifests
from kvlathe.plan.manifest import ENGINE_FILE, Limits, Manifest
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import cuda_library
from kvlathe.runtime.sessions.gpu.cuda_python import CudaPythonDevice
from kvlathe.runtime.sessions.gpu.device import DeviceArray
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.gpu.session import DeviceSession, tensor_types
from kvlathe.runtime.sessions.gpu.step_buffer import Bindings, StepArrays

DECODE, MIXED = 0, 1
"""The engine's profiles."""
BYTES = (np.dtype(np.uint8), np.dtype(np.int8))
"""Plugins take no unsigned bytes: for them the same bytes are signed."""


def obstacle(manifest: Manifest) -> str:
    """Why such an engine cannot run here, as far as can be told before it is loaded;
    empty if nothing is known."""
    flavour = FLAVOURS[manifest.backend]
    if util.find_spec(flavour.module) is None:
        return f"{flavour.module} is not installed: {flavour.install}"
    if "plugin" not in manifest.versions:
        return f"it was built without {PLUGIN}, so nothing in it extends the cache: build it again beside the plugin"
    if find_plugin() is None:
        return f"{PLUGIN} is not built here: docs/native.md says how"
    return ""


def open_session(
    folder: Path,
    plan: CompressionPlan,
    limits: Limits,
    arena_bytes: int,
    threads: int | None = None,
) -> DeviceSession:
    """Load ``folder``'s engine with a cache of ``arena_bytes`` on GPU 0.

    ``threads`` is for sessions on a CPU. That nothing is missing was asked before
    (runtime/sessions/registry.py). Raises KvlatheError where TensorRT refuses the
    engine, in its words, and for an engine that is not of this plan.
    """
    backend = manifests.read(folder).backend
    trt = import_module(FLAVOURS[backend].module)
    engine = load_engine(trt, folder / ENGINE_FILE)
    device, library = CudaPythonDevice(), cuda_library(backend)
    pool = allocate_pool(device, library, plan, arena_bytes)
    compute = TensorRTCompute(trt, engine, plan, device.stream)
    return DeviceSession(device, library, plan, limits, pool, compute)


class TensorRTCompute:
    """A Compute: an engine that TensorRT has loaded."""

    outputs = frozenset({"logits", "rows"})
    least_rows = 1

    def __init__(
        self,
        trt: Any,  # noqa: ANN401  TensorRT's module
        engine: Any,  # noqa: ANN401  its ICudaEngine
        plan: CompressionPlan,
        stream: int,
    ) -> None:
        """Raises KvlatheError for an engine whose tensors are not those of ``plan``."""
        self._engine = engine
        self.tensors = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._check_tensors(trt, tensor_types(plan))
        self._decode = Context(engine, DECODE, stream)
        self._mixed = Context(engine, MIXED, stream)

    def _check_tensors(self, trt: Any, ours: dict[str, np.dtype]) -> None:  # noqa: ANN401
        """All that the engine reads and writes is ours, of our type, and on the GPU."""
        for name in self.tensors:
            kind = np.dtype(trt.nptype(self._engine.get_tensor_dtype(name)))
            if name not in ours or not _same(kind, ours[name]):
                raise KvlatheError(
                    f"the engine has a tensor {name} of {kind}",
                    "this runtime knows no such tensor",
                    "build the engine again",
                )
            if self._engine.is_shape_inference_io(name):
                raise KvlatheError(
                    f"the engine wants {name} in host memory",
                    "its shapes depend on it",
                    "report this, with the engine's layers.txt",
                )

    def queue(self, step: StepArrays, outputs: Bindings) -> None:
        context = self._decode if step.kind.decode else self._mixed
        arrays = {**step.arrays, **outputs}
        for name in self.tensors:
            context.bind(name, arrays[name], read=name in step.arrays)
        context.run()


def _same(kind: np.dtype, ours: np.dtype) -> bool:
    return kind == ours or {kind, ours} <= set(BYTES)


class Context:
    """An execution context of one profile. What is bound stays bound: a shape that is
    set again may cost a new plan."""

    def __init__(self, engine: Any, profile: int, stream: int) -> None:  # noqa: ANN401
        self._engine, self._profile, self._stream = engine, profile, stream
        self._context = engine.create_execution_context()
        if self._context is None or not self._context.set_optimization_profile_async(
            profile, stream
        ):
            raise OutOfMemory(
                "TensorRT gives no execution context",
                "it is out of memory",
                "ask for less cache",
            )
        self._bound: dict[str, DeviceArray] = {}

    def bind(self, name: str, array: DeviceArray, read: bool) -> None:
        if self._bound.get(name) == array:
            return
        done = self._context.set_tensor_address(name, array.address)
        if read:
            shape = self._within(name, array.shape)
            done = self._context.set_input_shape(name, shape) and done
        if not done:
            smallest, _, largest = self._profile_of(name)
            raise KvlatheError(
                f"TensorRT refuses {name} of shape {array.shape}",
                f"its profile goes from {smallest} to {largest}",
                "build with larger limits",
            )
        self._bound[name] = array

    def _within(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The pool may be larger than the profile says: page tables lead to its pages,
        and its shape is only named."""
        if not name.startswith("pool_"):
            return shape
        return min(shape[0], self._profile_of(name)[2][0]), shape[1]

    def _profile_of(self, name: str) -> Any:  # noqa: ANN401  smallest, usual and largest shape
        return self._engine.get_tensor_profile_shape(name, self._profile)

    def run(self) -> None:
        """Queue the step."""
        if not self._context.execute_async_v3(self._stream):
            raise KvlatheError(
                "TensorRT cannot run a step", "its log above says why", "report this"
            )


def load_engine(trt: Any, path: Path) -> Any:  # noqa: ANN401
    """The engine in a file, with the plugin that it names. Raises KvlatheError with
    TensorRT's words."""
    logger, plugin = logger_of(trt), find_plugin()
    if trt.get_plugin_registry().load_library(str(plugin)) is None:
        raise KvlatheError(
            f"TensorRT cannot load {plugin}",
            logger.last_error,
            "build it again: docs/native.md",
        )
    engine = trt.Runtime(logger).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise KvlatheError(
            f"TensorRT does not take {path} here",
            logger.last_error or "it gave no reason",
            "build it here, or with --backend cuda",
        )
    return engine
