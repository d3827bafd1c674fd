"""TrtSession: a TensorRT or TensorRT-RTX engine whose Attend nodes are our plugin. No torch.

Memory, stream and CUDA graphs are DeviceSession's. Here: the engine, an execution context for each of its two profiles
(engines/tensorrt.py: decode steps, and any mix of chunks and decodes), and where their tensors are. The plugin reads
and extends the pool in place, so the pool is an input like any other.
"""

from __future__ import annotations

from importlib import import_module, util
from pathlib import Path
from typing import Any

import numpy as np

from kvlathe.engines import manifest as manifests
from kvlathe.engines.manifest import ENGINE_FILE, Limits, Manifest
from kvlathe.errors import KvlatheError
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime.cuda_abi import CudaLibrary
from kvlathe.runtime.device import Device
from kvlathe.runtime.device_session import Bindings, Bound, DeviceSession, library_here
from kvlathe.tensorrt_library import FLAVOURS, PLUGIN, find_plugin, logger_of

DECODE, MIXED = 0, 1
"""The engine's profiles."""
BYTES = (np.dtype(np.uint8), np.dtype(np.int8))
"""Plugins take no unsigned bytes: for them the same bytes are signed."""


def obstacle(manifest: Manifest) -> str:
    """Why such an engine cannot run here, as far as can be told before it is loaded; empty if nothing is known."""
    flavour = FLAVOURS[manifest.backend]
    if util.find_spec(flavour.module) is None:
        return f"{flavour.module} is not installed: {flavour.install}"
    if "plugin" not in manifest.versions:
        return f"it was built without {PLUGIN}, so nothing in it extends the cache: build it again beside the plugin"
    if find_plugin() is None:
        return f"{PLUGIN} is not built here: docs/native.md says how"
    return ""


class TrtSession(DeviceSession):
    """Loads ``folder``'s engine with a cache of ``arena_bytes`` on GPU 0. ``threads`` is for sessions on a CPU.

    That nothing is missing (runtime/sessions.py) was asked before. Raises KvlatheError where TensorRT refuses the
    engine, in its words, and for an engine that is not of this plan.
    """

    def __init__(
        self, folder: Path, plan: CompressionPlan, limits: Limits, arena_bytes: int, threads: int | None = None
    ) -> None:
        manifest = manifests.read(folder)
        trt = import_module(FLAVOURS[manifest.backend].module)
        engine = load_engine(trt, folder / ENGINE_FILE)
        self._start(trt, engine, Device(), library_here(manifest.backend), plan, limits, arena_bytes)

    def _start(
        self,
        trt: Any,  # noqa: ANN401  TensorRT's module
        engine: Any,  # noqa: ANN401  its ICudaEngine
        device: Device,
        library: CudaLibrary,
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
    ) -> None:
        super().__init__(device, library, plan, limits, arena_bytes)
        self._engine = engine
        self._tensors = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._check_tensors(trt)
        self._contexts = [Context(engine, profile, device.stream) for profile in (DECODE, MIXED)]

    def _check_tensors(self, trt: Any) -> None:  # noqa: ANN401
        """Everything that the engine reads and writes is ours, of our type, and on the GPU."""
        one = self._any.form
        ours = {**self._inputs(self._any.bindings(one), 1), **self._outputs(one, self._logits)}
        for name in self._tensors:
            kind = np.dtype(trt.nptype(self._engine.get_tensor_dtype(name)))
            if name not in ours or not (kind == ours[name].dtype or {kind, ours[name].dtype} <= set(BYTES)):
                fact = f"the engine has a tensor {name} of {kind}"
                raise KvlatheError(fact, "this runtime knows no such tensor", "build the engine again")
            if self._engine.is_shape_inference_io(name):
                fact = f"the engine wants {name} in host memory"
                raise KvlatheError(fact, "its shapes depend on it", "report this, with the engine's layers.txt")

    def compute(self, inputs: Bindings, outputs: Bindings, decode: bool) -> None:
        context, arrays = self._contexts[DECODE if decode else MIXED], {**inputs, **outputs}
        for name in self._tensors:
            context.bind(name, arrays[name], read=name in inputs)
        context.run()


class Context:
    """An execution context of one profile. What is bound stays bound: a shape that is set again may cost a new plan."""

    def __init__(self, engine: Any, profile: int, stream: int) -> None:  # noqa: ANN401
        self._engine, self._profile, self._stream = engine, profile, stream
        self._context = engine.create_execution_context()
        if self._context is None or not self._context.set_optimization_profile_async(profile, stream):
            raise KvlatheError("TensorRT gives no execution context", "it is out of memory", "ask for less cache")
        self._bound: dict[str, Bound] = {}

    def bind(self, name: str, array: Bound, read: bool) -> None:
        if self._bound.get(name) == array:
            return
        done = self._context.set_tensor_address(name, array.address)
        if read:
            done = self._context.set_input_shape(name, self._within(name, array.shape)) and done
        if not done:
            fact, known = f"TensorRT refuses {name} of shape {array.shape}", self._profile_of(name)
            raise KvlatheError(fact, f"its profile goes from {known[0]} to {known[2]}", "build with larger limits")
        self._bound[name] = array

    def _within(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The pool may be larger than the profile says: it is found through page tables, and its size only named."""
        return (min(shape[0], self._profile_of(name)[2][0]), shape[1]) if name.startswith("pool_") else shape

    def _profile_of(self, name: str) -> Any:  # noqa: ANN401  smallest, usual and largest shape
        return self._engine.get_tensor_profile_shape(name, self._profile)

    def run(self) -> None:
        """Queue the step."""
        if not self._context.execute_async_v3(self._stream):
            raise KvlatheError("TensorRT cannot run a step", "its log above says why", "report this")


def load_engine(trt: Any, path: Path) -> Any:  # noqa: ANN401
    """The engine in a file, with the plugin that it names. Raises KvlatheError with TensorRT's words."""
    logger, plugin = logger_of(trt), find_plugin()
    if trt.get_plugin_registry().load_library(str(plugin)) is None:
        raise KvlatheError(f"TensorRT cannot load {plugin}", logger.last_error, "build it again: docs/native.md")
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        reason = logger.last_error or "it gave no reason"
        raise KvlatheError(f"TensorRT does not take {path} here", reason, "build it here, or with --backend cuda")
    return engine
