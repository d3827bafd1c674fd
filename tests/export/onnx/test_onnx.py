"""The ONNX function is the eager op; the exported model is the torch decoder, in pieces
or at once."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from onnx import helper, numpy_helper

from kvlathe.base.errors import KvlatheError
from kvlathe.export.attention.node import node_inputs
from kvlathe.export.attention.tables import LayerTables, PlanFacts
from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.folding.fold import decoder_from, fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.export.model.weights_file import Place
from kvlathe.export.onnx import model as model_of
from kvlathe.export.onnx.attend import DOMAIN, NAME, OPSET, attend_function
from kvlathe.export.onnx.body import FLOAT, HALF
from kvlathe.export.onnx.model import export_onnx
from kvlathe.plan.formats import Bits, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from tests.export.attention.test_attend import eager, observed_mass
from tests.support.attend_cases import VIEWS, Case, cases, plan_of
from tests.support.checkpoints import make, whole_plan
from tests.support.nightly import rest_nightly

LETTERS = {
    "q": ["T"],
    "k": ["T"],
    "v": ["T"],
    "cos": ["T"],
    "sin": ["T"],
    "cu_seqlens_q": ["B+1"],
}
LETTERS |= {"query_offsets": ["Q"], "lengths": ["B"], "observation_weights": ["T"]}


KINDS: dict[int, torch.dtype] = {FLOAT: torch.float32, HALF: torch.float16}


def session(model: str | bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def one_node(
    case: Case, dtype: int = FLOAT
) -> tuple[onnx.ModelProto, dict[str, npt.NDArray]]:
    """A model of a single Attend node, and what to feed it."""
    kind, step = KINDS[dtype], case.step()
    assert step.cos is not None and step.sin is not None
    values = dict(zip("qkv", case.packed(kind), strict=True)) | {
        "cos": step.cos.to(kind),
        "sin": step.sin.to(kind),
    }
    values |= {
        name: getattr(step, name)
        for name in ("cu_seqlens_q", "query_offsets", "lengths")
    } | step.pools
    if step.observation_weights is not None:
        values["observation_weights"] = step.observation_weights
    values |= {f"page_table_{i}": table for i, table in enumerate(step.page_tables)}
    fixed = {
        name: value.numpy() for name, value in case.state(kind).items()
    } | LayerTables(case.plan, case.layer)
    names = node_inputs(case.plan, case.layer)
    feeds = {name: values[name].numpy() for name in names if name not in fixed}
    inputs = []
    for name, value in feeds.items():
        letters = LETTERS.get(
            name, ["B", f"M{name}"] if name.startswith("page") else [f"N{name}"]
        )
        shape = letters + list(value.shape[len(letters) :])
        inputs.append(
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), shape
            )
        )
    hot = HALF if max(PlanFacts(case.plan).hot_bits) == 16 else FLOAT
    outputs = [
        helper.make_tensor_value_info(n, t, ["T", n])
        for n, t in (("o", dtype), ("rows", hot))
    ]
    if case.plan.index.observes:
        outputs.append(helper.make_tensor_value_info("mass", FLOAT, ["B", "H", "N"]))
    node = helper.make_node(
        NAME,
        names,
        [output.name for output in outputs],
        domain=DOMAIN,
        layer=case.layer,
        scale=case.scale,
    )
    graph = helper.make_graph(
        [node],
        "one",
        inputs,
        outputs,
        [numpy_helper.from_array(fixed[n], n) for n in names if n in fixed],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    functions = [attend_function(case.plan, dtype)]
    return helper.make_model(
        graph, functions=functions, opset_imports=opsets, ir_version=10
    ), feeds


def through_onnx(case: Case, dtype: int = FLOAT) -> tuple[npt.NDArray, ...]:
    """o and rows of the real tokens, and mass where the plan has an observation window."""
    model, feeds = one_node(case, dtype)
    onnx.checker.check_model(model)
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    found = session(model.SerializeToString()).run(None, feeds)
    out, rows, *mass = (np.asarray(x) for x in found)
    return (
        out[: case.total].astype(np.float64),
        rows[: case.total].astype(np.float64),
        *mass,
    )


@settings(max_examples=25)
@given(cases())
def test_function_is_the_eager_op(case: Case) -> None:
    function_is_the_eager_op(case)


@pytest.mark.nightly
@settings(max_examples=200)
@given(cases())
def test_function_is_the_eager_op_in_many_cases(case: Case) -> None:
    function_is_the_eager_op(case)


def function_is_the_eager_op(case: Case) -> None:
    out, rows, *mass = through_onnx(case)
    eager_out, eager_rows = eager(case)
    exact = PlanFacts(case.plan).hot_bits[0] == 32
    near, close = (1e-5, 1e-4) if exact else (2e-3, 4e-3)
    np.testing.assert_allclose(rows, eager_rows, rtol=near, atol=near)
    np.testing.assert_allclose(out, eager_out, rtol=close, atol=close)
    for found in mass:
        np.testing.assert_allclose(
            found,
            observed_mass(case),
            rtol=1e-4 if exact else 4e-3,
            atol=1e-5 if exact else 4e-3,
        )


@settings(max_examples=10)
@given(cases())
def test_half_precision_function_is_attention(case: Case) -> None:
    half_precision_function_is_attention(case)


@pytest.mark.nightly
@settings(max_examples=80)
@given(cases())
def test_half_precision_function_is_attention_in_many_cases(case: Case) -> None:
    half_precision_function_is_attention(case)


def half_precision_function_is_attention(case: Case) -> None:
    out, rows, *_ = through_onnx(case, HALF)
    expected_out, expected_rows = case.expected()
    np.testing.assert_allclose(rows, expected_rows, rtol=1e-2, atol=3e-2)
    np.testing.assert_allclose(out, expected_out, rtol=5e-2, atol=6e-2)


# -- the whole model -------------------------------------------------------------------


class Pages:
    """A cache that a test fills itself: poisoned memory, pages in a shuffled order,
    rows written lane by lane."""

    def __init__(self, plan: CompressionPlan, batch: int, tokens: int) -> None:
        self.plan, self.layout = plan, CacheLayout(plan)
        self.tables, first = [], 0
        for stride in self.layout.page_stride:
            count = -(-tokens // plan.page_tokens)
            ids = np.random.default_rng(0).permutation(batch * count).astype(
                np.int32
            ) + -(-first // stride)
            first = (int(ids.max()) + 1) * stride
            self.tables.append(ids.reshape(batch, count))
        self.memory = np.full(-(-first // 256) * 256, 255, np.uint8)
        self.views = {
            name: self.memory.view(VIEWS[name]).reshape(-1, plan.index.unit)
            for name in PlanFacts(plan).pools
        }

    def write(self, sequence: int, place: int, row: npt.NDArray) -> None:
        """Append one token's row to its places in the fresh buckets."""
        heads, at = self.plan.model.kv_heads, 0
        for layer in range(self.plan.model.layers):
            lanes = self.plan.index.active(layer)
            for part in ("k", "v"):
                for lane in lanes:
                    rank = getattr(lane, f"rank_{part}")
                    self._put(
                        lane.layer * heads + lane.head,
                        part,
                        sequence,
                        place,
                        row[at : at + rank],
                    )
                    at += rank

    def _put(
        self, index: int, part: str, sequence: int, place: int, values: npt.NDArray
    ) -> None:
        for b, bucket in enumerate(self.plan.index.buckets):
            if index in bucket.lanes:
                page, token = (
                    self.tables[b][sequence, place // self.plan.page_tokens],
                    place % self.plan.page_tokens,
                )
                start = page * self.layout.page_stride[b] + getattr(
                    self.layout.lane_offsets(b, index), part
                )
                self.memory[start + token * values.nbytes :][: values.nbytes] = (
                    values.view(np.uint8)
                )


def run_in_chunks(
    model: ort.InferenceSession,
    plan: CompressionPlan,
    texts: list[list[int]],
    chunks: list[list[int]],
) -> list[npt.NDArray]:
    """Logits of every position of every text, fed in capacity-padded steps:
    chunks[i][b] tokens of text b in step i."""
    pages, seen = Pages(plan, len(texts), max(map(len, texts))), [0] * len(texts)
    found: list[list[npt.NDArray]] = [[] for _ in texts]
    for counts in chunks:
        spans = [range(s, s + n) for s, n in zip(seen, counts, strict=True)]
        ids = [text[i] for text, span in zip(texts, spans, strict=True) for i in span]
        arrays = {
            "input_ids": [*ids, 1, 1],
            "positions": [*itertools.chain(*spans), 0, 0],
            "cu_seqlens_q": [0, *itertools.accumulate(counts)],
            "query_offsets": range(max(counts)),
            "logit_rows": range(len(ids)),
            "lengths": [[s] * len(plan.index.buckets) for s in seen],
        }
        feeds = {
            name: np.array(value, np.int32) for name, value in arrays.items()
        } | pages.views
        feeds |= {f"page_table_{b}": table for b, table in enumerate(pages.tables)}
        wanted = {entry.name for entry in model.get_inputs()}
        fed = {name: value for name, value in feeds.items() if name in wanted}
        logits, rows = (np.asarray(x) for x in model.run(None, fed))
        places = [(b, i) for b, span in enumerate(spans) for i in span]
        for (b, i), row, logit in zip(places, rows, logits, strict=False):
            pages.write(b, i, row)
            found[b].append(logit)
        seen = [span.stop for span in spans]
    return [np.array(rows) for rows in found]


def odd_plan(
    checkpoint: Checkpoint, hot: Bits, removed: bool
) -> tuple[CompressionPlan, Basis]:
    """Different ranks in every lane, random bases, even and odd lanes in two buckets,
    perhaps one lane removed."""
    shape, rng = checkpoint.spec.shape, np.random.default_rng(1)
    lanes, basis, d = [], Basis(), shape.head_dim
    rope = "full" if checkpoint.spec.rope else "none"
    for layer, head in itertools.product(range(shape.layers), range(shape.kv_heads)):
        if removed and head == 1 and layer == 0:
            lanes.append(Lane(layer, head, 0, 0, 0, rope, fill_from=0))
            continue
        rank_k, rank_v = 16 * (1 + head % 2), 16 * (1 + layer % 2)
        width = d if rope == "full" else rank_k
        lanes.append(
            Lane(layer, head, width, rank_k, rank_v, rope, projected=rope == "full")
        )
        turn = np.linalg.qr(rng.normal(size=(d, d)))[0]
        cut = {
            "a": turn[:, :rank_k],
            "b": turn[:, :rank_k],
            "a_v": turn[:, :rank_v],
            "o_v": turn[:, :rank_v].T,
        }
        basis[layer, head] = LaneBasis(
            **cut, centre_k=rng.normal(size=d) / 9, centre_v=rng.normal(size=d) / 9
        )
    kept = [i for i, lane in enumerate(lanes) if not lane.removed]
    groups = [Group(tuple(kept[i::2]), Tier(hot, hot)) for i in range(2)]
    plan = plan_of(lanes, groups, d, shape.group_size)
    return dataclasses.replace(plan, model=shape), basis


@pytest.mark.parametrize(
    ("name", "hot", "removed"),
    rest_nightly(
        [
            ("llama", 32, True),
            ("qwen3", 16, False),
            ("falcon-40b", 32, False),
            ("gpt2", 32, True),
        ],
        ("qwen3", 16, False),
        ("falcon-40b", 32, False),
        ("gpt2", 32, True),
    ),
)
def test_exported_is_torch_in_pieces_and_at_once(
    name: str, hot: Bits, removed: bool, tmp_path: Path
) -> None:
    make(tmp_path, name)
    checkpoint = Checkpoint(tmp_path)
    plan, basis = odd_plan(checkpoint, hot, removed)
    model = session(
        str(
            export_onnx(
                checkpoint.spec,
                plan,
                fold(checkpoint, plan, basis),
                tmp_path / "engine",
            )
        )
    )
    rng = np.random.default_rng(2)
    texts = [rng.integers(3, 90, n).tolist() for n in (41, 20, 33)]
    chunks = [[16, 0, 32], [0, 20, 0], [24, 0, 1], [1, 0, 0]]
    decoder = decoder_from(checkpoint, plan, basis)
    for text, pieces, whole in zip(
        texts,
        run_in_chunks(model, plan, texts, chunks),
        run_in_chunks(model, plan, texts, [[len(text) for text in texts]]),
        strict=True,
    ):
        expected = decoder.logits(text, range(len(text))).numpy()
        np.testing.assert_allclose(whole, expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(pieces, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", rest_nightly(["float32", "float16"], "float16"))
def test_export_twice_gives_the_same_readable_file(dtype: str, tmp_path: Path) -> None:
    make(tmp_path, "llama")
    checkpoint = Checkpoint(tmp_path)
    plan, basis = odd_plan(checkpoint, 16, False)
    digests = []
    for name in ("a", "b"):
        path = export_onnx(
            checkpoint.spec, plan, fold(checkpoint, plan, basis), tmp_path / name, dtype
        )
        digests.append(
            [
                hashlib.sha256(file.read_bytes()).hexdigest()
                for file in (path, Path(f"{path}.data"))
            ]
        )
    assert digests[0] == digests[1]
    model = onnx.load(path, load_external_data=False)
    attends = [node for node in model.graph.node if node.domain == DOMAIN]
    assert [node.name for node in attends] == [
        f"layers.{i}.attend/Attend" for i in range(checkpoint.spec.layers)
    ]
    assert {entry.key: entry.value for entry in model.metadata_props}[
        "kvlathe.plan"
    ] == plan.digest
    assert not [
        node for node in model.graph.node if node.metadata_props or node.doc_string
    ]
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    shapes = {
        entry.name: [
            d.dim_param or d.dim_value for d in entry.type.tensor_type.shape.dim
        ]
        for entry in model.graph.input
    }
    assert shapes["input_ids"] == ["T"]
    assert shapes["page_table_1"] == ["B", "M_1"]
    large = [
        t
        for t in model.graph.initializer
        if t.data_location == onnx.TensorProto.EXTERNAL
    ]
    assert all(
        int(entry.value) % 4096 == 0
        for t in large
        for entry in t.external_data
        if entry.key == "offset"
    )


@pytest.mark.slow
def test_foreign_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is the same for all of them, and traced once."""
    real, graphs, known = model_of._graph, [], {}

    def once(
        spec: DecoderSpec,
        plan: CompressionPlan,
        stage: int,
        places: dict[str, Place],
        *rest: Any,  # noqa: ANN401
    ) -> onnx.ModelProto:
        if not graphs:
            graphs.append(real(spec, plan, stage, known, *rest))
        places.update(known)
        return graphs[0]

    monkeypatch.setattr(model_of, "_graph", once)
    make(tmp_path, "llama")
    checkpoint = Checkpoint(tmp_path)
    plan, basis = odd_plan(checkpoint, 32, False)
    weights = dict(fold(checkpoint, plan, basis))
    for spoiled in (
        {**weights, "layers.0.q.weight": torch.zeros(3, 3)},
        {**weights, "lm_head.weight": torch.zeros(3)},
        {name: weight for name, weight in weights.items() if name != "norm.weight"},
    ):
        with pytest.raises(KvlatheError):
            export_onnx(checkpoint.spec, plan, spoiled, tmp_path / "engine")
    assert len(graphs) == 1


def test_norms_of_16_bit_are_widened_in_the_graph(tmp_path: Path) -> None:
    """Their weights are few, and have no values while a graph is traced: nothing may be
    computed of them alone."""
    make(tmp_path, "gpt2")
    spec = Checkpoint(tmp_path).spec
    plan = whole_plan(spec, bits=16)
    graph = model_of.trace(spec, plan, torch.float16, OPSET).graph
    kinds = {node.op_type for node in graph}
    assert {"Cast", "LayerNormalization"} <= kinds
    assert "norm.weight" in graph.initializers
