"""OrtSession: an exported model on ONNX Runtime's CPU provider, over pages in host memory.

The pool reaches the graph as OrtValues that share the arena's memory; nothing is copied, however large it is. The graph
only reads it: its second output holds the step's rows, which ``append`` writes to their places.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from kvlathe.engines.manifest import ONNX_FILE, Limits
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime.host_pages import HostPages
from kvlathe.runtime.ragged import by_size
from kvlathe.runtime.session import StepPlan


class OrtSession(HostPages):
    """Loads ``folder``/model.onnx with an arena of ``arena_bytes``. Raises KvlatheError if ONNX Runtime refuses it."""

    attention = "the function that the ONNX model carries (standard operators, CPU)"
    """What runs kvlathe::Attend here."""

    def __init__(
        self, folder: Path, plan: CompressionPlan, limits: Limits, arena_bytes: int, threads: int | None = None
    ) -> None:
        super().__init__(CacheLayout(plan), arena_bytes)
        self.limits = limits
        try:
            options = self.options(threads)
            self._session = ort.InferenceSession(str(folder / ONNX_FILE), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's own exceptions have no common base
            raise KvlatheError(
                f"ONNX Runtime {ort.__version__} cannot load {folder / ONNX_FILE}", str(error), "build the engine again"
            ) from error
        names = [entry.name for entry in self._session.get_inputs()]
        self._inputs = frozenset(names)
        self.pool = {n: ort.OrtValue.ortvalue_from_numpy(view) for n, view in self.views.items() if n in self._inputs}

    def options(self, threads: int | None) -> ort.SessionOptions:
        """How ONNX Runtime opens the model."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or physical_cores()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        return options

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """Logits [R, vocab]; the step's rows are in the pool afterwards. Raises KvlatheError beyond the profile."""
        self._check(step)
        logits = np.empty((len(step.logit_rows), self.plan.model.vocab_size), np.float32)
        for part, places in by_size(step):
            logits[places] = self._run(part)
        return logits

    def _run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        tables = {f"page_table_{b}": table for b, table in enumerate(step.page_tables)}
        arrays = {
            "input_ids": step.input_ids,
            "positions": step.positions,
            "query_starts": step.query_starts,
            "query_offsets": step.query_offsets,
            "lengths": step.lengths,
            "logit_rows": step.logit_rows,
        }
        feeds = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in (arrays | tables).items() if n in self._inputs}
        logits, rows = self._session.run_with_ort_values(["logits", "rows"], feeds | self.pool)
        self.append(step, rows.numpy())
        return logits.numpy()

    def _check(self, step: StepPlan) -> None:
        for count, limit, flag in (
            (len(step.input_ids), self.limits.max_num_tokens, "max_num_tokens"),
            (len(step.query_starts) - 1, self.limits.max_batch_size, "max_batch_size"),
        ):
            if count > limit:
                raise KvlatheError(
                    f"a step of {count} exceeds this engine", f"its {flag} is {limit}", f"build with a larger --{flag}"
                )


def physical_cores() -> int:
    """Cores this process may use, hardware threads of one core counted once (where the system says so)."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_siblings(cpu) for cpu in usable}
    return max(1, len(siblings))


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text("ascii").strip() if path.is_file() else str(cpu)
