"""Graphs of float32 compute the experts that a step chose, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import torch

from benchmarks.experts import graph_of, looped
from kvlathe.export.bases.basis import Basis
from kvlathe.export.families import Experts
from kvlathe.export.folding.fold import fold
from kvlathe.export.model.blocks import ExpertBlock
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.onnx.model import export_onnx
from tests.export.onnx.test_onnx import run_in_chunks, session
from tests.support.checkpoints import make, whole_plan

HIDDEN, INNER = 24, 20
KINDS: dict[str, tuple[str, Experts]] = {
    "softmax": ("silu", Experts(9, 3, INNER, normalized=True)),
    "sigmoids in groups": (
        "gelu_pytorch_tanh",
        Experts(
            8,
            2,
            INNER,
            normalized=False,
            scores="sigmoid",
            corrected=True,
            groups=4,
            kept_groups=2,
        ),
    ),
    "chosen by logits": (
        "silu",
        Experts(
            9,
            3,
            INNER,
            normalized=True,
            scores="sigmoid",
            corrected=True,
            by_logits=True,
        ),
    ),
    "weighed before": (
        "silu",
        Experts(9, 3, INNER, normalized=False, scores="sigmoid", before=True),
    ),
    "bounded after their activation": (
        "silu",
        Experts(9, 3, INNER, normalized=True, limit=0.4),
    ),
    "without gates": ("relu2", Experts(9, 3, INNER, normalized=True, gated=False)),
    "biased and bounded": (
        "silu",
        Experts(9, 3, INNER, normalized=True, biased=True, alpha=1.7, limit=0.6),
    ),
}
Array = npt.NDArray[np.float64]


def block_of(kind: str) -> ExpertBlock:
    activation, experts = KINDS[kind]
    block = ExpertBlock(experts, HIDDEN, activation, torch.float32)
    draw = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        parameter.data.normal_(generator=draw)
    return block


def expected(block: ExpertBlock, kind: str, x: Array) -> tuple[Array, set[int]]:
    """[T, D] in float64, token by token, and which experts any token chose."""
    activation, experts = KINDS[kind]
    own: dict[str, Array] = {
        name: parameter.detach().double().numpy()
        for name, parameter in block.named_parameters()
    }
    out, chosen = np.zeros_like(x), set[int]()
    for t, row in enumerate(x):
        logits = row @ own["router"] + own.get("router_bias", 0.0)
        scores = 1 / (1 + np.exp(-logits))
        if experts.scores == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum()
        ranked = logits if experts.by_logits else scores
        ranked = ranked + own.get("correction", 0.0)
        by_group = ranked.reshape(experts.groups, -1)
        if experts.groups > 1:
            best = np.sort(by_group, 1)[:, -2:].sum(1)
            kept = np.argsort(-best)[: experts.kept_groups]
            by_group[[g for g in range(experts.groups) if g not in kept]] = -np.inf
        places = np.argsort(-by_group.reshape(-1))[: experts.chosen]
        total = scores[places].sum() if experts.normalized else 1.0
        for e in places:
            share = scores[e] / total
            read, given = (share, 1.0) if experts.before else (1.0, share)
            out[t] += given * one_expert(own, activation, experts, read * row, e)
        chosen |= set(places.tolist())
    return out, chosen


def one_expert(
    own: dict[str, Array], activation: str, experts: Experts, row: Array, e: int
) -> Array:
    def bias(name: str) -> Any:  # noqa: ANN401
        return own[name][e].reshape(-1) if name in own else 0.0

    up = row @ own["up"][e] + bias("up_bias")
    if not experts.gated:
        return np.maximum(up, 0) ** 2 @ own["down"][e]
    gate = row @ own["gate"][e] + bias("gate_bias")
    if experts.limit and not experts.alpha:
        activated = np.minimum(gate / (1 + np.exp(-gate)), experts.limit)
        inner = activated * np.clip(up, -experts.limit, experts.limit)
    elif experts.limit:
        gate, up = (
            np.minimum(gate, experts.limit),
            np.clip(up, -experts.limit, experts.limit),
        )
        inner = gate / (1 + np.exp(-experts.alpha * gate)) * (up + 1)
    elif activation == "silu":
        inner = gate / (1 + np.exp(-gate)) * up
    else:
        cubic = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        inner = 0.5 * gate * (1 + np.tanh(cubic)) * up
    return inner @ own["down"][e] + bias("down_bias")


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_experts_give_what_the_formula_says_and_others_are_not_read(
    kind: str,
) -> None:
    """Experts that no token chose hold NaN, which no product forgives."""
    block, (_, experts) = block_of(kind), KINDS[kind]
    x = np.random.default_rng(5).standard_normal((2, HIDDEN)).astype(np.float32)
    found, chosen = expected(block, kind, x.astype(np.float64))
    unread = sorted(set(range(experts.count)) - chosen)
    assert unread
    for name, parameter in block.named_parameters():
        if name in ("gate", "up", "down"):
            parameter.data[unread] = torch.nan
    model = looped(block, experts, HIDDEN).SerializeToString()
    run = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    got = np.asarray(run.run(None, {run.get_inputs()[0].name: x})[0])
    np.testing.assert_allclose(got, found, rtol=1e-4, atol=1e-4)


def test_graphs_of_float16_compute_every_expert() -> None:
    """They run on GPUs, too, where a loop waits for its host at each turn."""
    experts = Experts(4, 2, INNER, normalized=True)
    block = ExpertBlock(experts, HIDDEN, "silu", torch.float16)
    kinds = {node.op_type for node in graph_of(block, HIDDEN, torch.float16).graph.node}
    assert "MatMul" in kinds and "Experts" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_an_engine_with_experts_is_its_decoder_in_steps_of_any_size(
    family: str, tmp_path: Path
) -> None:
    make(tmp_path, family)
    checkpoint = Checkpoint(tmp_path)
    plan = whole_plan(checkpoint.spec)
    weights = fold(checkpoint, plan, Basis())
    path = export_onnx(checkpoint.spec, plan, weights, tmp_path / "engine")
    plain = Decoder(checkpoint.spec, plan)
    plain.load_state_dict(dict(weights))
    text = np.random.default_rng(0).integers(3, 90, 30).tolist()
    (found,) = run_in_chunks(session(str(path)), plan, [text], [[16], [13], [1]])
    np.testing.assert_allclose(
        found, plain.logits(text, range(30)), rtol=1e-3, atol=1e-3
    )
