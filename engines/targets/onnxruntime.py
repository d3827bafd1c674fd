"""The ONNX Runtime engine: the exported graphs are the engine. Building means proving
that the runtime takes them."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.backends import Built
from kvlathe.engines.targets import cuda
from kvlathe.engines.targets.child import ChildFailed, run_module
from kvlathe.plan.adapter_maps import adapter_graph
from kvlathe.plan.kernel_forms import node_refusal
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan, graph_files


def identify(name: str) -> Built:
    """ONNX Runtime runs the same file on every machine it runs on; the manifest adds
    the GPUs that its plan suits."""
    return Built(versions={"onnxruntime": _version()}, architectures=("cpu",))


def _version() -> str:
    """The version of the one that is installed: both packages hold the same module."""
    try:
        return version("onnxruntime")
    except PackageNotFoundError:
        return version("onnxruntime-gpu")


def check_plan(name: str, plan: CompressionPlan) -> None:
    """It runs every plan: the graph carries what the kernels lack."""


def gpus(plan: CompressionPlan, dtype: str) -> tuple[str, ...]:
    """GPUs where the same graph runs on ONNX Runtime's CUDA provider: those of the
    CUDA kernels, if they take it."""
    try:
        cuda.check_plan("cuda", plan)
    except KvlatheError:
        return ()
    if plan.index.moves_tokens or plan.stages or node_refusal(plan):
        return ()
    return cuda.ARCHITECTURES if dtype == "float16" else ()


def build(name: str, folder: Path, plan: CompressionPlan, limits: Limits) -> None:
    """Load each graph once, in a child process: its memory is gone before the next
    step, and a crash stays there."""
    for stage, name in enumerate(graph_files(plan)):
        _check_graph(folder / name, _wanted(plan, stage))
        taking = folder / adapter_graph(name)
        if taking.is_file():
            _check_graph(taking, [*_wanted(plan, stage), "adapters"])


def _check_graph(path: Path, wanted: list[str]) -> None:
    """Raise KvlatheError unless ONNX Runtime loads a graph that has what is wanted."""
    try:
        found = json.loads(run_module("kvlathe.engines.targets.onnxruntime", str(path)))
    except ChildFailed as error:
        raise KvlatheError(
            "ONNX Runtime does not load the exported graph", str(error), "report this"
        ) from error
    missing = set(wanted) - set(found)
    if missing:
        raise KvlatheError(
            f"the exported {path.name} is not what the runtime asks",
            f"it lacks {sorted(missing)}",
            "report this",
        )


def _wanted(plan: CompressionPlan, stage: int) -> list[str]:
    """The tensors of docs/attend.md that the graph of every plan has."""
    tables = [f"page_table_{b}" for b in range(len(plan.index.buckets_of(stage)))]
    return [
        "input_ids" if stage == 0 else "hidden",
        "positions",
        "cu_seqlens_q",
        "query_offsets",
        "lengths",
        "logit_rows",
        *tables,
        "logits" if stage == plan.index.graphs - 1 else "next_hidden",
        "rows",
    ]


def _load(path: str) -> list[str]:
    """Names of the graph's inputs and outputs. No optimization, no repacking (weights
    stay in the mapped file), and no plan of buffers, whose time grows with the square of
    the nodes: minutes where every head has a form of its own."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.enable_mem_reuse = False
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    return [value.name for value in (*session.get_inputs(), *session.get_outputs())]


if __name__ == "__main__":
    print(json.dumps(_load(sys.argv[1])))
