"""TensorRT and TensorRT-RTX engines from the same ONNX file, by the same code.

TensorRT-RTX builds ahead of time on a machine without a GPU; TensorRT builds on the GPU
it will run on. Attend becomes our plugin where its library is built
(kvlathe/base/tensorrt_library.py), and else its model-local function. The build happens
in a child process (``_main``), because these libraries end their process when something
inside fails. What was built is proved afterwards, from the finished engine's own layer
list (layers.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module, util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvlathe.base.console import log
from kvlathe.base.digests import sha256_file
from kvlathe.base.errors import KvlatheError
from kvlathe.base.tensorrt_library import (
    FLAVOURS,
    PLUGIN,
    Flavour,
    find_plugin,
    logger_of,
)
from kvlathe.engines.backends import Built, check_token_ranking, check_windows
from kvlathe.engines.targets import cuda
from kvlathe.engines.targets.child import ChildFailed, run_module
from kvlathe.engines.targets.layers import check_attention, required_nodes
from kvlathe.plan.kernel_forms import ages_refusal, node_refusal, unlike_refusal
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import (
    ENGINE_FILE,
    ONNX_FILE,
    WEIGHTS_FILE,
    Limits,
)
from kvlathe.plan.plan import CompressionPlan

LAYERS_FILE = "layers.txt"
"""The finished engine's layers, as its inspector prints them: readable without a
GPU."""
ATTEND, POOL = ("kvlathe", "Attend"), "pool_f16"
"""The node that the plugin computes, and the input that it updates in place."""
AMPERE = 80
"""TensorRT-RTX documentation, "CPU-Only AOT and TensorRT-RTX Engines": what is targeted
when nothing is asked for."""


# -- promise before --------------------------------------------------------------------
def identify(name: str) -> Built:
    """Version and targets. Raises KvlatheError, with what to install, where the library
    is missing."""
    flavour = FLAVOURS[name]
    if util.find_spec(flavour.module) is None:
        raise KvlatheError(
            f"the backend {name} needs the package {flavour.distribution}",
            "it is missing",
            flavour.install,
        )
    trt = import_module(flavour.module)
    versions = {name: _version(flavour, trt)}
    if library := find_plugin():
        versions["plugin"] = sha256_file(library)[:16]
    else:
        log.warning(
            "%s is not built: engines run Attend as the function in the graph", PLUGIN
        )
    return Built(
        versions, _own_gpu() if flavour.needs_gpu else _ahead_of_time_targets(trt)
    )


def _version(flavour: Flavour, trt: Any) -> str:  # noqa: ANN401  the module
    try:
        return version(flavour.distribution)
    except PackageNotFoundError:
        return str(trt.__version__)


def _ahead_of_time_targets(trt: Any) -> tuple[str, ...]:  # noqa: ANN401
    """An engine built for no particular GPU runs on Ampere and later; Turing would need
    an engine of its own."""
    return tuple(
        f"sm_{number}"
        for number in map(int, trt.ComputeCapability.__members__.values())
        if number >= AMPERE
    )


def _own_gpu() -> tuple[str, ...]:
    """The compute capability of GPU 0, from the CUDA driver. Raises KvlatheError where
    there is no GPU."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        ready = (
            cuda.cuInit(0) == 0
            and cuda.cuDeviceComputeCapability(
                ctypes.byref(major), ctypes.byref(minor), 0
            )
            == 0
        )
    except OSError:
        ready = False
    if not ready:
        raise KvlatheError(
            "no GPU was found",
            "TensorRT builds on the GPU it will run on",
            "use --backend tensorrt_rtx",
        )
    return (f"sm_{major.value}{minor.value}",)


def polygraphy_speaks(name: str) -> None:
    """Make polygraphy use this library. It must happen before any of its TensorRT
    modules is imported."""
    identify(name)
    if name == "tensorrt_rtx":
        from polygraphy import config

        config.USE_TENSORRT_RTX = True
        sys.modules.setdefault("tensorrt_rtx", import_module(FLAVOURS[name].module))


def check_plan(name: str, plan: CompressionPlan) -> None:
    """Raise KvlatheError for a plan that has more than one graph, whose graph is asked
    what attends its tokens, or that neither the plugin's kernels (those of the cuda
    backend) nor, where it is not built, the parser can compute.
    """
    if plan.stages:
        raise KvlatheError(
            f"{name} cannot build a plan that drops hidden states",
            "it has a graph for each group of layers, and an engine holds one",
            "compress in one group (stages=1), or build for onnxruntime",
        )
    if refusal := unlike_refusal(plan) or ages_refusal(plan):
        raise KvlatheError(f"the backend {name} cannot run this plan", *refusal)
    check_token_ranking(name, plan.index.moves_tokens)
    check_windows(name, plan.index.sees_less)
    if find_plugin() is not None:
        cuda.check_plan(name, plan)
        if refusal := node_refusal(plan):
            raise KvlatheError(f"the backend {name} cannot run this plan", *refusal)
        return
    coded = [b.tier for b in plan.index.buckets if b.tier.arithmetic == "int"]
    if bits := sorted(
        {form.bits for tier in coded for form in tier.formats if form.is_coded}
    ):
        raise KvlatheError(
            f"{name} cannot multiply codes of {' and '.join(map(str, bits))} bits",
            f"it has no MatMulInteger, and {PLUGIN} is not built",
            "ask for arithmetic=float, or build for onnxruntime",
        )


# -- build -----------------------------------------------------------------------------
def build(name: str, folder: Path, plan: CompressionPlan, limits: Limits) -> None:
    """model.onnx (fp16) becomes model.engine and layers.txt; the ONNX file and its
    weights leave the folder.

    Raises KvlatheError with the library's own words if it does not parse or build, and
    naming the layers if the engine lost an attention.
    """
    onnx_path, library = folder / ONNX_FILE, find_plugin()
    required = required_nodes(onnx_path, plugin=library is not None)
    job = {
        "module": FLAVOURS[name].module,
        "onnx": str(onnx_path),
        "engine": str(folder / ENGINE_FILE),
        "layers": str(folder / LAYERS_FILE),
        "profiles": profiles(plan, limits),
        "plugin": str(library or ""),
    }
    with tempfile.TemporaryDirectory() as links:
        try:
            run_module(
                "kvlathe.engines.targets.tensorrt",
                json.dumps(job),
                _library_path(FLAVOURS[name], Path(links)),
            )
        except ChildFailed as error:
            raise KvlatheError(
                f"{name} cannot build the exported graph",
                str(error),
                "try --backend onnxruntime",
            ) from error
    check_attention((folder / LAYERS_FILE).read_text("utf-8"), required)
    for source in (onnx_path, folder / WEIGHTS_FILE):
        source.unlink(missing_ok=True)


def _library_path(flavour: Flavour, links: Path) -> dict[str, str]:
    """TensorRT-RTX's parser opens ``libtensorrt_rtx.so`` and its package has ``.so.1``
    alone: a link cures it."""
    spec = None if flavour.needs_gpu else util.find_spec("tensorrt_rtx_libs")
    if spec is None or not spec.submodule_search_locations:
        return {}
    for library in Path(spec.submodule_search_locations[0]).glob("lib*.so.1"):
        (links / library.name.removesuffix(".1")).symlink_to(library)
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(links), os.environ.get("LD_LIBRARY_PATH")])
        )
    }


# -- shapes ----------------------------------------------------------------------------
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest, most usual and largest shape of one input."""
Range3 = tuple[int, int, int]


def profiles(plan: CompressionPlan, limits: Limits) -> list[dict[str, Shapes]]:
    """Two optimization profiles: decode (one query a sequence), and a packed step of
    any mix of chunks and decodes."""
    batch, tokens = limits.max_batch_size, limits.max_num_tokens
    chunk = min(plan.prefill_chunk, tokens)
    return [
        _profile(
            plan,
            limits,
            tokens=(1, min(batch, tokens), min(batch, tokens)),
            queries=(1, 1, 1),
        ),
        _profile(plan, limits, tokens=(1, chunk, tokens), queries=(1, chunk, tokens)),
    ]


def _profile(
    plan: CompressionPlan, limits: Limits, tokens: Range3, queries: Range3
) -> dict[str, Shapes]:
    """Shapes of docs/attend.md's inputs. The pool may hold every page that the limits
    allow, in every bucket."""
    buckets = range(len(plan.index.buckets))
    most = -(-limits.max_seq_len // plan.page_tokens)
    batch, pages = (
        (1, limits.max_batch_size, limits.max_batch_size),
        (1, -(-most // 2), most),
    )
    units = [
        limits.max_batch_size
        * m
        * sum(CacheLayout(plan).page_stride)
        // plan.index.unit
        for m in pages
    ]
    pools = {
        f"pool_{name}": _pool_shapes(units, width, plan.index.unit)
        for name, width in {"f32": 4, "f16": 2, "u8": 1}.items()
    }
    sizes = {
        "input_ids": [(n,) for n in tokens],
        "positions": [(n,) for n in tokens],
        "logit_rows": [(n,) for n in tokens],
        "cu_seqlens_q": [(n + 1,) for n in batch],
        "query_offsets": [(n,) for n in queries],
        "lengths": [(n, len(buckets)) for n in batch],
        **{f"page_table_{b}": list(zip(batch, pages, strict=True)) for b in buckets},
        **pools,
    }
    return {name: (low, usual, high) for name, (low, usual, high) in sizes.items()}


def _pool_shapes(units: list[int], width: int, unit: int) -> list[tuple[int, ...]]:
    """Shapes of a pool's view in elements of ``width`` bytes, where ``units`` count
    bytes."""
    return [(n // width, unit) for n in units]


# -- the child process -----------------------------------------------------------------
def _main(job: Mapping[str, Any]) -> None:
    """Parse, build, write the engine and its layer list. Exits with the library's last
    error on stderr."""
    trt = import_module(job["module"])
    logger = logger_of(trt)
    if job["plugin"] and trt.get_plugin_registry().load_library(job["plugin"]) is None:
        sys.exit(
            f"the plugin library {job['plugin']} cannot be loaded: {logger.last_error}"
        )
    builder = trt.Builder(logger)
    network = builder.create_network(
        1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    )
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(_graph(job), job["onnx"]):
        error = parser.get_error(0)
        sys.exit(
            f"node {error.node_name()} ({error.node_operator()}): {error.desc()}".replace(
                "\n", " "
            )
        )
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job["plugin"]:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    inputs = [network.get_input(i).name for i in range(network.num_inputs)]
    for shapes in job["profiles"]:
        profile = builder.create_optimization_profile()
        for name in inputs:
            profile.set_shape(name, *shapes[name])
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        sys.exit(logger.last_error or "it gave no reason")
    with Path(job["engine"]).open("wb") as file:
        file.write(engine)
    Path(job["layers"]).write_text(
        logger.layers or _inspected(trt, logger, engine), "utf-8"
    )


def _graph(job: Mapping[str, Any]) -> bytes:
    """The ONNX file; for the plugin with its third output, the pool that it has updated
    in place, handed from layer to layer. Plugins take no unsigned bytes: for them the
    same bytes are signed."""
    import onnx

    model = onnx.load(job["onnx"], load_external_data=False)
    if not job["plugin"]:
        return model.SerializeToString()
    for value in model.graph.input:
        if value.type.tensor_type.elem_type == onnx.TensorProto.UINT8:
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    pool = POOL
    for node in model.graph.node:
        if (node.domain, node.op_type) == ATTEND:
            node.input[:] = [pool if name == POOL else name for name in node.input]
            pool = f"{node.name}/pool"
            node.output.append(pool)
    return model.SerializeToString()


def _inspected(trt: Any, logger: Any, engine: Any) -> str:  # noqa: ANN401
    """The engine inspector's own words. It needs the GPU that the engine is for."""
    loaded = trt.Runtime(logger).deserialize_cuda_engine(engine)
    if loaded is None:
        sys.exit(f"the engine was built and cannot be inspected: {logger.last_error}")
    return loaded.create_engine_inspector().get_engine_information(
        trt.LayerInformationFormat.ONELINE
    )


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
