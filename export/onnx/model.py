"""Export the decoder as model.onnx, or as one graph for each stage of its plan, with
the weights beside them.

1. Trace the decoder on fake tensors: no weight is in memory. 2. Tidy the graph: names people can read, shapes by
letter, no traces of this machine. 3. Point every weight at its place in model.onnx.data and write it there as it
arrives. 4. Attach the function that gives Attend its meaning. 5. Prove: checker and strict shape inference, on the
files. Exporting twice gives the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript import optimizer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kvlathe.base.console import log
from kvlathe.export.attention.tables import LayerTables, PlanFacts
from kvlathe.export.model.blocks import experts_op, routing_of
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.device import CPU
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.weights_file import DTYPES, Place, wiring, write_weights
from kvlathe.export.onnx.adapters import with_adapters
from kvlathe.export.onnx.attend import DOMAIN, OPSET, attend_function
from kvlathe.export.onnx.body import FLOAT, HALF
from kvlathe.export.onnx.experts import experts_function, part_names
from kvlathe.export.onnx.recur import recurrence_functions
from kvlathe.plan.adapter_maps import AdapterMap, adapter_graph
from kvlathe.plan.manifest import GIVEN, LAST_HIDDEN, WEIGHTS_FILE
from kvlathe.plan.plan import CompressionPlan, graph_files
from kvlathe.plan.weight_formats import PLAIN, WeightFormats

IR_VERSION = 10
CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
TYPES = {"float32": FLOAT, "float16": HALF}
STORED = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.UINT8: torch.uint8,
}


def export_onnx(
    spec: DecoderSpec,
    plan: CompressionPlan,
    weights: Mapping[str, Tensor],
    out_dir: Path,
    dtype: str = "float32",
    opset: int = OPSET,
    device: torch.device = CPU,
    formats: WeightFormats = PLAIN,
    adapters: Sequence[AdapterMap] = (),
) -> Path:
    """Write ``out_dir``/model.onnx, or a graph for each stage (graph_files), and
    model.onnx.data, whose weights they share; return the first. Beside each, where
    ``adapters`` names maps, the graph that takes adapters of them.

    ``weights`` are the decoder's state, on ``device``, asked for one by one. ``dtype`` (float32 or
    float16) is that of weights and activations, ``formats`` of weights that are codes;
    logits are float32 and rows in the plan's hot format. Peak memory is
    the graphs and one tensor. Raises KvlatheError for weights that are not the decoder's.
    """
    places: dict[str, Place] = {}
    graphs: dict[str, onnx.ModelProto] = {}
    for stage, name in enumerate(graph_files(plan)):
        log.info("exporting %s", name)
        graphs[name] = _graph(spec, plan, stage, places, dtype, opset, formats)
        if adapters:
            taking = with_adapters(graphs[name], adapters, spec.layers, dtype)
            graphs[adapter_graph(name)] = taking
    out_dir.mkdir(parents=True, exist_ok=True)
    log.info("folding and writing weights")
    write_weights(out_dir / WEIGHTS_FILE, places, weights, device)
    for name, proto in graphs.items():
        (out_dir / name).write_bytes(proto.SerializeToString(deterministic=True))
        log.info("checking %s", name)
        prove(out_dir / name)
    return out_dir / next(iter(graphs))


def _graph(
    spec: DecoderSpec,
    plan: CompressionPlan,
    stage: int,
    places: dict[str, Place],
    dtype: str,
    opset: int,
    formats: WeightFormats,
) -> onnx.ModelProto:
    """The model of one stage; its weights are added to ``places``."""
    model = trace(spec, plan, DTYPES[dtype], opset, stage, formats)
    place_weights(model, places)
    place_tables(model, plan, stage)
    facts = {
        "kvlathe.version": _version(),
        "kvlathe.plan": plan.digest,
        "kvlathe.opset": str(opset),
    }
    model.metadata_props.update(
        facts | {"kvlathe.wiring": json.dumps(asdict(wiring(spec, plan)))}
    )
    model.opset_imports[DOMAIN] = 1
    if formats.maps is not None:
        model.opset_imports[CONTRIB] = 1
    proto = ir.to_proto(model)
    proto.functions.append(attend_function(plan.part(stage), TYPES[dtype], opset))
    if any(plan.model.states):
        proto.functions.extend(recurrence_functions(opset))
    ops = {node.op_type for node in proto.graph.node}
    proto.functions.extend(_experts(spec, opset, ops))
    return proto


def _experts(
    spec: DecoderSpec, opset: int, ops: set[str]
) -> Iterator[onnx.FunctionProto]:
    """Functions of those of the operators ``ops`` that are experts."""
    family = spec.family
    for experts in dict.fromkeys(map(family.experts_of, range(spec.layers))):
        if experts is None or experts_op(routing_of(experts)) not in ops:
            continue
        names, routing = part_names(experts.gated, experts.biased), routing_of(experts)
        with _quiet():
            yield experts_function(names, routing, family.activation, opset)


# -- trace -----------------------------------------------------------------------------


def trace(
    spec: DecoderSpec,
    plan: CompressionPlan,
    dtype: torch.dtype,
    opset: int,
    stage: int = 0,
    formats: WeightFormats = PLAIN,
) -> ir.Model:
    """The graph of one stage with Attend nodes, tidied; its initializers have shapes
    and types but no values."""
    with FakeTensorMode(allow_non_fake_inputs=True), _quiet():
        decoder = Decoder(spec, plan, dtype, stage, formats).eval()
        decoder.gives_hidden = spec.gives_hidden
        arguments, dims = _example(decoder)
        program = torch.export.export(
            decoder, arguments, dynamic_shapes=dims, strict=False
        )
        exported = torch.onnx.export(
            program, dynamo=True, optimize=False, opset_version=opset, verbose=False
        )
    assert exported is not None
    model = exported.model
    # TensorRT wants axes and ranges spelled out.
    optimizer.fold_constants(model, should_fold=_unless_of_weights)
    RemoveUnusedNodesPass()(model)
    _tidy(model, decoder)
    return model


def _unless_of_weights(node: ir.Node) -> bool | None:
    """False for a node that reads a weight, which has no values yet, however small it is:
    norms of 16 bit are widened. None elsewhere: the optimizer decides."""
    given = [None if value is None else value.const_value for value in node.inputs]
    raw = [getattr(one, "raw", None) for one in given]
    return False if any(isinstance(x, FakeTensor) for x in raw) else None


def _example(decoder: Decoder) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Inputs of the decoder with no two sizes alike, and the letters of their dynamic
    sizes."""
    plan = decoder.plan
    form, buckets = PlanFacts(plan), range(len(plan.index.buckets))
    sizes = {"T": 11, "B": 3, "B+1": 4, "Q": 5, "R": 7}
    letters = {name: torch.export.Dim(name.replace("+1", "_plus_1")) for name in sizes}

    def ints(*shape: str | int) -> Tensor:
        numbers = [sizes[x] if isinstance(x, str) else x for x in shape]
        return torch.zeros(numbers, dtype=torch.int32)

    types = {
        "pool_f32": torch.float32,
        "pool_f16": torch.float16,
        "pool_u8": torch.uint8,
    }
    pools = {
        name: torch.zeros(64 + i, plan.index.unit, dtype=types[name])
        for i, name in enumerate(form.pools)
    }
    tables = [torch.zeros(sizes["B"], 13 + i, dtype=torch.int32) for i in buckets]
    t, b = {0: letters["T"]}, {0: letters["B"]}
    hidden = torch.zeros(sizes["T"], decoder.spec.hidden_size, dtype=decoder.dtype)
    dims = (
        *(t, t, {0: letters["B+1"]}, {0: letters["Q"]}, b),
        [{**b, 1: torch.export.Dim(f"M_{i}")} for i in buckets],
        {name: {0: torch.export.Dim(f"{name}_units")} for name in pools},
        {0: letters["R"]},
    )
    arguments = (
        ints("T") if decoder.first else hidden,
        ints("T"),
        ints("B+1"),
        ints("Q"),
        ints("B", len(buckets)),
        tables,
        pools,
        ints("R"),
    )
    if decoder.spec.reads_hidden:
        return (*arguments, None, None, None, hidden), (*dims, None, None, None, t)
    numbers = sum(plan.model.states)
    if plan.index.observes or numbers:
        rows = ints("T").float() if plan.index.observes else None
        arguments, dims = (*arguments, rows), (*dims, t if rows is not None else None)
    if not numbers:
        return arguments, dims
    return (*arguments, ints("B", numbers).float()), (*dims, b)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """The exporter talks about packages that nobody needs here."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


# -- tidy ------------------------------------------------------------------------------


def _tidy(model: ir.Model, decoder: Decoder) -> None:
    graph, plan = model.graph, decoder.plan
    renamed = {"source": "input_ids" if decoder.first else "hidden"}
    renamed |= {
        f"page_tables_{i}": f"page_table_{i}" for i in range(len(plan.index.buckets))
    }
    renamed |= {f"pools_{name}": name for name in PlanFacts(plan).pools}
    for value in graph.inputs:
        value.name = renamed.get(value.name or "", value.name)
    names = (
        "logits" if decoder.last else "next_hidden",
        "rows",
        *(["mass"] if plan.index.observes else []),
        *(["states_after"] if any(plan.model.states) else []),
        *([LAST_HIDDEN] if decoder.last and decoder.gives_hidden else []),
    )
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name
    _letter_shapes(graph)
    used: Counter[str] = Counter()
    for node in graph:
        name = _scoped(node)
        used[name] += 1
        node.name = name if used[name] == 1 else f"{name}_{used[name] - 1}"
    for thing in (model, graph, *graph, *_values(graph)):
        thing.metadata_props.clear()
        thing.meta.clear()
    model.producer_name, model.producer_version, model.ir_version, graph.name = (
        "kvlathe",
        _version(),
        IR_VERSION,
        "decoder",
    )


def _scoped(node: ir.Node) -> str:
    """``layers.3.attend/Attend``: the module path that the exporter noted, then the
    operator."""
    scopes = (
        node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
        .strip("[]")
        .replace("'", "")
        .split(", ")
    )
    return "/".join([*scopes[-2:-1], node.op_type]).lstrip("/")


def _letter_shapes(graph: ir.Graph) -> None:
    """Dynamic sizes carry the letters of docs/attend.md instead of the exporter's
    symbols."""
    known = {
        "input_ids": ["T"],
        "hidden": ["T"],
        GIVEN: ["T"],
        "cu_seqlens_q": ["B+1"],
        "query_offsets": ["Q"],
        "lengths": ["B"],
        "logit_rows": ["R"],
        "observation_weights": ["T"],
        "states": ["B"],
        **{f"page_table_{i}": ["B", f"M_{i}"] for i in range(len(graph.inputs))},
        **{f"pool_{kind}": [f"pool_{kind}_units"] for kind in ("f32", "f16", "u8")},
    }
    letters: dict[str, str] = {}
    for value in graph.inputs:
        for dim, letter in zip(
            value.shape or (), known.get(value.name or "", ()), strict=False
        ):
            letters[str(dim)] = letter
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    x if isinstance(x, int) else letters.get(str(x), str(x))
                    for x in value.shape
                ]
            )


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [
        *graph.inputs,
        *graph.initializers.values(),
        *(value for node in graph for value in node.outputs),
    ]


# -- weights ---------------------------------------------------------------------------


def place_weights(model: ir.Model, places: dict[str, Place]) -> None:
    """Point each weight at its place: the one it has, or the next free one. Of other
    initializers, tables of layers are integers, and the graph's own are single numbers."""
    at = max((place.next for place in places.values()), default=0)
    for name, value in model.graph.initializers.items():
        if value.dtype is None or value.dtype not in STORED or not value.shape:
            continue
        shape = tuple(int(n) for n in value.shape)  # type: ignore[arg-type]
        place = places.get(name) or Place(at, shape, STORED[value.dtype])
        value.const_value = ir.ExternalTensor(
            WEIGHTS_FILE,
            place.offset,
            place.size,
            value.dtype,
            shape=value.shape,
            name=name,
        )
        at = max(at, place.next)
        places[name] = place


def place_tables(model: ir.Model, plan: CompressionPlan, stage: int) -> None:
    """The layout arrays are small: they stay in the model file."""
    part = plan.part(stage)
    for i, layer in enumerate(plan.index.layers_of(stage)):
        if not plan.model.heads(layer).kv_heads:
            continue
        for name, table in LayerTables(part, part.model.source(i)).items():
            key = f"layers.{layer}.attend.{name}"
            model.graph.initializers[key].const_value = ir.tensor(table, name=key)


# -- prove -----------------------------------------------------------------------------


def prove(path: Path) -> None:
    """The written file passes the checker and strict shape inference. Raises onnx's
    errors: that is our bug."""
    onnx.checker.check_model(str(path))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        onnx.shape_inference.infer_shapes_path(
            str(path), str(Path(folder) / path.name), strict_mode=True, data_prop=True
        )


def _version() -> str:
    try:
        return version("kvlathe")
    except PackageNotFoundError:
        return "0"
