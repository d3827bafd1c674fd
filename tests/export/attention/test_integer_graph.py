"""The graph of products of codes: its nodes, and what they cost."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import onnx
import onnx.inliner
import pytest
import torch
from onnx import helper

from kvlathe.export.attention import integer
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.onnx.attend import NAME
from kvlathe.plan.formats import Axis, Bits, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.tasks.metrics import Sums
from kvlathe.tasks.tasks import text_sums
from tests.export.onnx.test_onnx import one_node, session
from tests.support.attend_cases import Case, plan_of
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import (
    HOT,
    LIMITS,
    MODEL,
    TorchSession,
    model_shape,
    plan_for,
    text,
)

SUMS = {"k_sums_1", "v_sums_1"}
MOVES = {
    "Gather",
    "Reshape",
    "Transpose",
    "Squeeze",
    "Unsqueeze",
    "BitShift",
    "BitwiseAnd",
    "Identity",
    "Slice",
}
"""Operators that codes may pass on their way to a product; none of it makes a number of
another type. Packed bytes may also be cast to whole numbers, to look their codes up."""


def readers_of_codes(function: onnx.FunctionProto) -> set[str]:
    """Operators that read cached codes as data and are not MOVES, following them from
    the pool. Bytes of the pool that are gathered by the rows of stored sums are no
    codes."""
    codes, of_sums, found, tables = {"pool_u8"}, set(SUMS), set(), set()
    for node in function.node:
        if (
            node.op_type == "Constant"
            and node.attribute[0].t.data_type == onnx.TensorProto.UINT8
        ):
            tables |= set(node.output)
        if not node.input or node.op_type == "Shape":
            continue
        if node.op_type == "Add" and of_sums & set(node.input):
            of_sums |= set(node.output)
        if (
            node.op_type == "Gather"
            and node.input[0] == "pool_u8"
            and node.input[1] in of_sums
        ):
            continue
        looks_up = node.op_type == "Gather" and node.input[0] in tables
        if looks_up or (
            node.op_type == "Cast" and node.attribute[0].i == onnx.TensorProto.INT32
        ):
            codes |= set(node.output) if codes & set(node.input) else set()
            continue
        data = (
            node.input
            if node.op_type in ("MatMulInteger", "Concat")
            else node.input[:1]
        )
        if not codes & set(data):
            assert not codes & set(node.input), (
                f"{node.op_type} reads codes as an index"
            )
            continue
        if node.op_type in MOVES:
            codes |= set(node.output)
        else:
            found.add(node.op_type)
    return found


def plan_in(tier: Tier) -> Case:
    lanes = [
        Lane(layer, head, 32, 32, 48, projected=True)
        for layer in range(2)
        for head in range(2)
    ]
    groups = [Group((0, 1, 2, 3), Tier(32, 32), (tier,), SEAL)]
    return Case(
        plan_of(lanes, groups, 32, 2),
        0,
        [1, 4],
        [[3, 32], [0, 48]],
        0,
    )


KINDS: tuple[tuple[Axis, bool], ...] = (
    ("token", False),
    ("token", True),
    ("rank", False),
)
ARITHMETICS: tuple[tuple[Literal["float", "int"], bool], ...] = (
    ("float", False),
    ("int", False),
    ("int", True),
)
CODED: tuple[Bits, ...] = (2, 4, 8)


def test_no_float_tensor_of_codes_is_in_the_graph() -> None:
    """Whether the plan stores sums of codes or not, and where V's groups run along the
    rank: tokens may then go."""
    for bits, (axis, stored) in itertools.product(CODED, KINDS):
        model, feeds = one_node(
            plan_in(Tier(bits, bits, "rank", axis, 32, 16, "int", sums=stored))
        )
        (function,) = (f for f in model.functions if f.name == NAME)
        assert readers_of_codes(function) == {"MatMulInteger"}
        assert [node.op_type for node in function.node].count("MatMulInteger") == 2
        assert not [
            node for node in function.node if node.op_type == "DequantizeLinear"
        ]
        assert float_shapes(model, feeds).isdisjoint(
            {(2, 1, 2, 48, 32), (2, 1, 2, 48, 48), (2, 2, 48, 32), (2, 2, 32, 48)}
        )


def test_the_walk_sees_a_dequantizing_graph() -> None:
    model, feeds = one_node(plan_in(Tier(4, 4, "rank", "token", 32, 16, "float")))
    (function,) = (f for f in model.functions if f.name == NAME)
    assert readers_of_codes(function) == {"Cast"}
    assert {(2, 1, 2, 48, 32), (2, 1, 2, 48, 48)} <= float_shapes(model, feeds)


def float_shapes(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray]
) -> set[tuple[int, ...]]:
    """Shapes of all float values of a run of the model's one function, inlined."""
    inlined = onnx.inliner.inline_local_functions(model)
    kept = {output.name for output in inlined.graph.output}
    names = [
        name
        for node in inlined.graph.node
        for name in node.output
        if name and name not in kept
    ]
    inlined.graph.output.extend(
        helper.make_empty_tensor_value_info(name) for name in names
    )
    found = [
        np.asarray(value)
        for value in session(inlined.SerializeToString()).run(names, feeds)
    ]
    return {
        value.shape for value in found if value.dtype.name in ("float16", "float32")
    }


def test_attention_on_codes_of_constant_values_gives_that_constant() -> None:
    """Groups without range have scale 0, and the sum of the rounded shares cancels."""
    shares = torch.from_numpy(
        np.random.default_rng(0).dirichlet(np.ones(32), (1, 2, 3)).astype(np.float32)
    )
    codes, scale, low = (
        torch.zeros(1, 32, 16, dtype=torch.uint8),
        torch.zeros(1, 2, 16),
        torch.full((1, 2, 16), -2.75),
    )
    for sums in (None, torch.zeros(1, 2, 16)):
        found = integer.outputs(shares, integer.Coded(codes, scale, low, sums))
        np.testing.assert_allclose(found, -2.75, rtol=1e-6)


def perplexity(tier: Tier | None) -> float:
    """The perplexity of the shipped small model, every token attending the pages sealed
    in ``tier``."""
    shape, windows = model_shape(), [text(768, 768 * i) for i in range(3)]
    every = tuple(range(shape.layers * shape.kv_heads))
    group = Group(every, HOT, (tier,), SEAL) if tier else Group(every, HOT)
    plan = plan_for(shape, (group,))
    layout = CacheLayout(plan)
    size = layout.bytes_for(1024) + 8 * sum(layout.page_stride)
    pages = TorchSession(decoder_from(Checkpoint(MODEL), plan, Basis()), size)
    llm = LLM(pages, plan, LIMITS, Tokenizer(MODEL), size)
    return sum((text_sums(llm, window) for window in windows), Sums()).perplexity


@pytest.mark.parametrize("bits", rest_nightly(CODED[1:]))
def test_products_of_codes_cost_no_more_than_dequantizing(bits: Bits) -> None:
    """At 8 bit nothing to speak of; at 4 bit what the same codes cost when they are
    dequantized, in either form."""
    plain = perplexity(None)
    ratio = {
        (arithmetic, stored): perplexity(
            Tier(bits, bits, arithmetic=arithmetic, sums=stored)
        )
        / plain
        for arithmetic, stored in ARITHMETICS
    }
    for found in ratio.values():
        assert abs(found - ratio["float", False]) < (0.001 if bits == 8 else 0.005)
    if bits == 8:
        assert ratio["int", False] <= 1.0005
    else:
        assert ratio["float", False] > 1.002  # the codes were read
