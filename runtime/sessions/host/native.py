"""NativeSession: the same model.onnx, with kvlathe::Attend and sealing done by the
native library.

ONNX Runtime prefers an operator that is registered under the name of a function in the
model, so the graph stays whole: weights, matrix products and threads are ONNX
Runtime's, and Attend reads and extends the pool in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kvlathe.plan.codec import Bytes, Positions
from kvlathe.plan.manifest import Limits, Manifest
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native import library as native
from kvlathe.runtime.native.cpu import PageWriter
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.host import huge_pages
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.sessions.substeps import whole


class NativeSession(OrtSession):
    """An OrtSession of a float32 engine, faster. ``library`` must be loaded from a file
    (Native.load)."""

    element_bits = 32
    """Bits of the engine's numbers."""

    def __init__(
        self,
        folder: Path,
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
        threads: int | None = None,
        library: Native | None = None,
    ) -> None:
        chosen = library or native.find().native
        assert chosen is not None
        self.library = chosen
        super().__init__(folder, plan, limits, arena_bytes, threads)
        self._observes_seldom = plan.index.observes and not plan.index.ranked
        self._writer = PageWriter(
            self.library, plan
        )  # on this thread: under a millisecond a page
        huge_pages.collapse()  # the weights; the arena asks for itself

    def options(self, threads: int | None, plan: CompressionPlan) -> ort.SessionOptions:
        options = super().options(threads, plan)
        options.add_session_config_entry("kvlathe.element_bits", str(self.element_bits))
        options.add_session_config_entry("kvlathe.hot_bits", str(plan.index.hot_bits))
        options.register_custom_ops_library(str(self.library.path))
        return options

    substeps = staticmethod(whole)

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """As OrtSession.run. Where tokens are never ranked, a step without weights
        observes nothing, and the operator is told so."""
        if self._observes_seldom and step.observation_weights is None:
            step = dataclasses.replace(
                step, observation_weights=np.zeros(0, np.float32)
            )
        return super().run(step)

    def append(
        self, step: StepPlan, rows: npt.NDArray[np.floating], stage: int = 0
    ) -> None:
        """The operator has written them."""

    def encode(
        self,
        fresh: int,
        source: Bytes,
        cold: int,
        target: int,
        positions: Sequence[Positions],
    ) -> None:
        self._writer.seal(fresh, cold, [(source, self.rows[cold][target], positions)])

    def copy_tokens(
        self,
        source: Bytes,
        pages: Sequence[int],
        target: Bytes,
        targets: Sequence[int],
        fields: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        self._writer.move(fields, source, pages, target, targets, places)


class HalfSession(NativeSession):
    """A session of a float16 engine: Attend computes in float32 and rounds its
    outputs."""

    element_bits = 16


SESSIONS = {"float32": NativeSession, "float16": HalfSession}


def session_class(manifest: Manifest) -> type[OrtSession]:
    """The class that runs an engine of the onnxruntime backend in this process."""
    return OrtSession if obstacle(manifest) else SESSIONS[manifest.compute_dtype]


def attention(manifest: Manifest) -> str:
    """The code that runs kvlathe::Attend of this engine in this process, and if it is
    not the native library, why."""
    reason, library = obstacle(manifest), native.find().native
    if reason or library is None:
        return f"{OrtSession.attention}; NOT the native kernels: {reason}"
    return f"native kernels, {library.isa} ({library.path})"


def obstacle(manifest: Manifest) -> str:
    """Why the native kernels do not run this engine here; empty if they do."""
    if manifest.compute_dtype not in SESSIONS:
        types = " or ".join(SESSIONS)
        return (
            f"they compute engines in {types}, this one is in {manifest.compute_dtype}"
        )
    return native.find().reason
