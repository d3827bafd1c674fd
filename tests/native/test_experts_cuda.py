"""Chosen experts alone, by the Triton kernels, against every expert in float64. On a GPU;
or on a CPU by Triton's interpreter, where Triton is installed and TRITON_INTERPRET=1."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kvlathe.layers.experts import (
    PARTS,
    ExpertWeights,
    choose_experts,
    run_expert,
    run_experts,
)
from kvlathe.layers.routing import Routing
from kvlathe.plan.kernel_forms import UNPROVEN
from kvlathe.runtime.sessions.torch_cuda.model import grouped_experts
from kvlathe.runtime.sessions.torch_cuda.model.grouped_experts import (
    TILES,
    GroupedExperts,
    Tile,
    experts_map,
)

HIDDEN, INNER = 72, 40
GATED, BIASED, CORRECTED = "gate", "bias", "correction"
KINDS: dict[str, tuple[str, Routing, int, set[str]]] = {
    "softmax": ("silu", Routing(3, True), 9, {GATED}),
    "shares as they are": ("gelu", Routing(2, False), 5, {GATED}),
    "a plain MLP": ("relu2", Routing(3, True), 9, set()),
    "one expert": ("relu", Routing(1, False), 4, {GATED}),
    "bounded": ("silu", Routing(3, True, 1.7, 0.6), 9, {GATED, BIASED}),
    "corrected": (
        "silu",
        Routing(3, True, scores="sigmoid"),
        17,
        {GATED, CORRECTED},
    ),
    "groups": (
        "gelu_pytorch_tanh",
        Routing(2, False, scores="sigmoid", groups=4, kept_groups=2),
        8,
        {GATED, CORRECTED},
    ),
    "one after the other": ("silu", Routing(2, False, jitter=0.1), 6, {GATED}),
}
"""Activation, routing, experts and parts."""
LEAST = 2e-3
"""An error that halves have of numbers around 1."""


@pytest.fixture(scope="module")
def device() -> str:
    if find_spec("triton") is None:
        pytest.skip("no Triton")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU")
    return "cpu"


def weights_of(kind: str, device: str, seed: int = 0) -> ExpertWeights:
    _, _, count, parts = KINDS[kind]
    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=draw)
        return (numbers * HIDDEN**-0.5).half().to(device)

    correction = torch.rand(count, generator=draw).to(device)
    biased = BIASED in parts
    return ExpertWeights(
        router=drawn(HIDDEN, count) * 4,
        up=drawn(count, HIDDEN, INNER),
        down=drawn(count, INNER, HIDDEN),
        gate=drawn(count, HIDDEN, INNER) if GATED in parts else None,
        router_bias=drawn(count) if biased else None,
        gate_bias=drawn(count, 1, INNER) if biased else None,
        up_bias=drawn(count, 1, INNER) if biased else None,
        down_bias=drawn(count, HIDDEN) if biased else None,
        correction=correction if CORRECTED in parts else None,
    )


def rows_of(tokens: int, device: str, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, HIDDEN, generator=draw).half().to(device)


def expected(x: Tensor, weights: ExpertWeights, kind: str) -> Tensor:
    """[T, D] in float64, pair by pair, of the experts that halves choose."""
    activation, routing, _, _ = KINDS[kind]
    shares, experts = choose_experts(x, weights, routing)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (own, places) in enumerate(zip(shares, experts, strict=True)):
        for share, place in zip(own.tolist(), places.tolist(), strict=True):
            parts = {
                name: part[place].double()
                for name in PARTS
                if (part := getattr(weights, name)) is not None
            }
            one = ExpertWeights(router=weights.router, **parts)
            row = x[token : token + 1].double()
            out[token] += share * run_expert(row, one, routing, activation)[0].cpu()
    return out


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows} rows")
@pytest.mark.parametrize("kind", KINDS)
def test_chosen_experts_give_what_the_formula_says_and_others_are_not_read(
    kind: str, tile: Tile, device: str
) -> None:
    """Experts that no token chose hold NaN, which no product forgives."""
    activation, routing, count, _ = KINDS[kind]
    for tokens in (1, 2, 37):
        weights = weights_of(kind, device, tokens)
        x = rows_of(tokens, device, tokens)
        exact = expected(x, weights, kind)
        halves = run_experts(x, weights, routing, activation).double().cpu()
        read = set(choose_experts(x, weights, routing)[1].flatten().tolist())
        for part in weights.parts:
            part[sorted({*range(count)} - read)] = torch.nan
        found = GroupedExperts(weights, routing, activation).run(x, tile)
        assert found.dtype == x.dtype
        error = (found.double().cpu() - exact).abs().max()
        assert error <= max(LEAST, 1.5 * (halves - exact).abs().max())


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("kind", ["softmax", "one expert"])
def test_each_pair_has_one_row_in_a_tile_of_its_expert(
    kind: str, rows: int, device: str
) -> None:
    activation, routing, count, _ = KINDS[kind]
    grouped = GroupedExperts(weights_of(kind, device), routing, activation)
    draw = torch.Generator().manual_seed(2)
    for tokens in (1, 5, 64, 150):
        size = (tokens, routing.chosen)
        # Some experts are asked for more often than others.
        experts = torch.randint(0, count, size, generator=draw)
        experts = torch.minimum(experts, torch.randint(0, count, size, generator=draw))
        places, owners = grouped.grouped(experts.int().to(device), rows)
        pairs = places.cpu().unflatten(0, (-1, rows)) - 1
        told = sorted(pairs[pairs >= 0].tolist())
        assert told == list(range(experts.numel()))
        asked = experts.flatten()
        for own, owner in zip(pairs, owners.tolist(), strict=True):
            chose = asked[own[own >= 0]]
            assert (chose == owner).all() and (len(chose) > 0) == (owner >= 0)


def test_rows_of_no_numbers_leave_others_as_they_are(device: str) -> None:
    activation, routing, _, _ = KINDS["softmax"]
    grouped = GroupedExperts(weights_of("softmax", device), routing, activation)
    x = rows_of(9, device)
    before = grouped(x)
    x[4] = torch.nan
    after = grouped(x)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(after[others], before[others])
    assert after[4].isnan().all()


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_a_graph_groups_the_rows_that_it_is_given(tokens: int, device: str) -> None:
    if device != "cuda":
        pytest.skip("graphs are CUDA's")
    activation, routing, _, _ = KINDS["corrected"]
    grouped = GroupedExperts(weights_of("corrected", device), routing, activation)
    x = rows_of(tokens, device)
    grouped(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped(x)
    for seed in range(5):
        given = rows_of(tokens, device, seed)
        x.copy_(given)
        graph.replay()
        assert torch.equal(y, grouped(given))


@pytest.mark.parametrize("reason", ["not proven", "float32", "no Triton"])
def test_without_the_kernels_every_expert_computes_and_the_log_says_why(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    activation, routing, _, _ = KINDS["softmax"]
    weights, x = weights_of("softmax", "cpu"), rows_of(5, "cpu")
    monkeypatch.setenv(UNPROVEN, "0" if reason == "not proven" else "1")
    monkeypatch.setattr(grouped_experts, "KERNELS", "kvlathe.no_kernels_of_experts")
    if reason == "float32":
        tensors = {
            x: part.float() for x, part in vars(weights).items() if part is not None
        }
        weights, x = ExpertWeights(**tensors), x.float()
    told = {"not proven": UNPROVEN, "float32": "float32", "no Triton": "no_kernels"}
    grouped_experts.tell.cache_clear()
    with caplog.at_level(logging.WARNING, "kvlathe"):
        experts = [experts_map(weights, routing, activation) for _ in range(3)]
    assert torch.equal(experts[0](x), run_experts(x, weights, routing, activation))
    assert len(caplog.records) == 1
    assert "every expert" in caplog.text and told[reason] in caplog.text
