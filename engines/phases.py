"""The phases of a build: how long each took, and the most memory it had. Whoever wants
them opens ``recorded`` around the build."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Phase:
    """``host_bytes``: most resident memory of this process until the phase ended, files
    that were mapped included. ``gpu_bytes``: most memory of tensors on the GPU during
    it."""

    name: str
    seconds: float
    host_bytes: int
    gpu_bytes: int


_recorded: ContextVar[list[Phase] | None] = ContextVar("phases", default=None)


@contextmanager
def recorded() -> Generator[list[Phase]]:
    """Collect the phases that end inside."""
    phases: list[Phase] = []
    token = _recorded.set(phases)
    try:
        yield phases
    finally:
        _recorded.reset(token)


@contextmanager
def phase(name: str) -> Generator[None]:
    """Count everything that happens inside as one phase. Phases do not nest."""
    gpu = _gpu()
    if gpu is not None:
        gpu.reset_peak_memory_stats()
    started = time.monotonic()
    yield
    seconds = time.monotonic() - started
    phases = _recorded.get()
    if phases is None:
        return
    gpu = _gpu()
    on_gpu = 0 if gpu is None else gpu.max_memory_allocated()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    phases.append(Phase(name, seconds, usage.ru_maxrss * 1024, on_gpu))


def _gpu() -> ModuleType | None:
    """torch.cuda where torch is loaded and uses a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    cuda: ModuleType = torch.cuda
    return cuda
