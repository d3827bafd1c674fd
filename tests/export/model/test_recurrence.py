"""The recurrence of layers that keep a state: against one token after the other in
float64, in any pieces, and as the function that graphs carry."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from kvlathe.export.model.recurrence import NODES, recur
from kvlathe.export.onnx.attend import DOMAIN, OPSET
from kvlathe.export.onnx.body import FLOAT
from kvlathe.export.onnx.recur import recurrence_functions
from kvlathe.layers.mixers import Spans
from kvlathe.layers.recurrence import CHUNK

Rows = list[torch.Tensor]


def rows(seed: int, tokens: int, with_strengths: bool) -> tuple[Rows, torch.Tensor]:
    """q, k, v, decays and strengths of two sequences, and states."""
    draw = torch.Generator().manual_seed(seed)
    b, h, dk, dv = 2, 3, 5, 7
    q = torch.randn(b, tokens, h, dk, generator=draw)
    k = torch.nn.functional.normalize(torch.randn(q.shape, generator=draw), dim=-1)
    k[:, ::3] = k[:, :1].clone()  # alike keys, which replace one another
    v = torch.randn(b, tokens, h, dv, generator=draw)
    decays = -0.3 * torch.rand(b, tokens, h, generator=draw)
    strengths = torch.rand(b, tokens, h, generator=draw)
    states = torch.randn(b, h, dk, dv, generator=draw)
    return [q, k, v, decays, *([strengths] if with_strengths else [])], states


def one_by_one(given: Rows, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, decays, *strengths = (one.double() for one in given)
    state, outputs = states.double(), []
    for t in range(q.shape[1]):
        state = state * decays[:, t].exp()[..., None, None]
        added = v[:, t]
        for b in strengths:
            held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            added = (added - held) * b[:, t, :, None]
        state = state + k[:, t, :, :, None] * added[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def run(given: Rows, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, decays, *strengths = given
    return recur(q, k, v, decays, strengths[0] if strengths else None, states)


@pytest.mark.parametrize("with_strengths", [True, False])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 99), tokens=st.integers(1, 2 * CHUNK + 9), cut=st.floats(0, 1)
)
def test_pieces_of_any_size_equal_one_token_after_the_other(
    with_strengths: bool, seed: int, tokens: int, cut: float
) -> None:
    given, states = rows(seed, tokens, with_strengths)
    expected, after = one_by_one(given, states)
    first = int(cut * (tokens - 1)) + 1
    found, between = run([one[:, :first] for one in given], states)
    if first < tokens:
        rest, between = run([one[:, first:] for one in given], between)
        found = torch.cat([found, rest], 1)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(between.double(), after, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("with_strengths", [True, False])
@pytest.mark.parametrize("tokens", [1, 15, 16, 150])
def test_a_graph_computes_the_same(tokens: int, with_strengths: bool) -> None:
    given, states = rows(3, tokens, with_strengths)
    names = [
        "q",
        "k",
        "v",
        "decays",
        *(["strengths"] if with_strengths else []),
        "states",
    ]
    values = dict(zip(names, [*given, states], strict=True))
    node = helper.make_node(NODES[with_strengths], names, ["y", "after"], domain=DOMAIN)
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(x, FLOAT, [None] * values[x].ndim)
            for x in names
        ],
        [helper.make_tensor_value_info(x, FLOAT, [None] * 4) for x in ("y", "after")],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(
        graph,
        functions=recurrence_functions(OPSET),
        opset_imports=opsets,
        ir_version=10,
    )
    onnx.checker.check_model(model)
    session = ort.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found = session.run(None, {x: values[x].numpy() for x in names})
    for one, wanted in zip(found, one_by_one(given, states), strict=True):
        np.testing.assert_allclose(np.asarray(one), wanted.numpy(), atol=1e-4)


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), beyond=st.integers(0, 3)
)
def test_tokens_of_sequences_are_found_again(counts: list[int], beyond: int) -> None:
    """Also where a step has rows of no sequence behind all others."""
    ends = torch.tensor([0, *np.cumsum(counts)])
    total = int(ends[-1]) + beyond
    spans = Spans.of(ends, torch.arange(max(counts)), total, len(counts))
    x = torch.arange(1.0, total + 1)[:, None]
    spread = spans.spread(x)[..., 0]
    for row, (start, count) in zip(
        spread, zip(ends, counts, strict=False), strict=True
    ):
        assert row[:count].tolist() == list(
            range(int(start) + 1, int(start) + count + 1)
        )
        assert not row[count:].any()
    own = int(ends[-1])
    assert torch.equal(spans.packed(spread[..., None])[:own], x[:own])
