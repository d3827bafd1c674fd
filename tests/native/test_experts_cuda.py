"""Chosen experts alone, by the Triton kernels, against every expert in float64. On a GPU;
or on a CPU by Triton's interpreter, where Triton is installed and TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import BuildConfig, build
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.layers.coded_weight import CodedWeight
from kvlathe.layers.experts import (
    PARTS,
    ExpertWeights,
    Router,
    choose_experts,
    router_logits,
    run_expert,
    run_experts,
)
from kvlathe.layers.routing import Routing
from kvlathe.plan.manifest import DECODER_FILE
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from kvlathe.runtime.sessions.torch_cuda.model import grouped_experts
from kvlathe.runtime.sessions.torch_cuda.model.grouped_experts import (
    TILES,
    GroupedExperts,
    GroupedWeights,
    Tile,
    experts_map,
)
from kvlathe.runtime.sessions.torch_cuda.model.weights import read_decoder
from tests.native.library import Library

HIDDEN, INNER, LATENT = 72, 64, 40
"""With what fills up pairs of groups, both are more than they are."""
GATED, BIASED, CORRECTED, NARROW = "gate", "bias", "correction", "latent"
KINDS: dict[str, tuple[str, Routing, int, set[str]]] = {
    "softmax": ("silu", Routing(3, True), 9, {GATED}),
    "shares as they are": ("gelu", Routing(2, False), 5, {GATED}),
    "a plain MLP": ("relu2", Routing(3, True), 9, set()),
    "one expert": ("relu", Routing(1, False), 4, {GATED}),
    "bounded": ("silu", Routing(3, True, 1.7, 0.6), 9, {GATED, BIASED}),
    "bounded after its activation": ("silu", Routing(3, True, limit=0.4), 9, {GATED}),
    "weighed before": (
        "silu",
        Routing(2, False, scores="sigmoid", before=True),
        6,
        {GATED},
    ),
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
    "of a latent": (
        "relu2",
        Routing(3, True, scores="sigmoid"),
        9,
        {CORRECTED, NARROW},
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


def tensors_of(kind: str, device: str, seed: int = 0) -> dict[str, Tensor]:
    """The weights of experts by role."""
    _, _, count, parts = KINDS[kind]
    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=draw)
        return (numbers * HIDDEN**-0.5).half().to(device)

    reads = LATENT if NARROW in parts else HIDDEN
    found = {
        "router": drawn(HIDDEN, count) * 4,
        "up": drawn(count, reads, INNER),
        "down": drawn(count, INNER, reads),
    }
    if GATED in parts:
        found["gate"] = drawn(count, reads, INNER)
    if NARROW in parts:
        found |= {"into": drawn(HIDDEN, reads), "back": drawn(reads, HIDDEN) * 2}
    if CORRECTED in parts:
        found["correction"] = torch.rand(count, generator=draw).to(device)
    if BIASED in parts:
        found["router_bias"] = drawn(count)
        found["gate_bias"] = drawn(count, 1, INNER)
        found["up_bias"] = drawn(count, 1, INNER)
        found["down_bias"] = drawn(count, HIDDEN)
    return found


def grouped_of(tensors: dict[str, Tensor], kind: str) -> GroupedExperts:
    activation, routing, _, _ = KINDS[kind]
    return GroupedExperts(GroupedWeights.of(tensors), routing, activation)


def rows_of(tokens: int, device: str, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, HIDDEN, generator=draw).half().to(device)


def without_ties(x: Tensor, weights: Router, kind: str) -> Tensor:
    """The rows whose logits all differ: of equal ones, any may be chosen."""
    logits = router_logits(x, weights, KINDS[kind][1]).sort(-1).values
    return x[(logits.diff(dim=-1) > 0).all(-1)]


def expected(x: Tensor, weights: ExpertWeights, kind: str) -> Tensor:
    """[T, D] in float64, pair by pair, of the experts that halves choose."""
    activation, routing, _, _ = KINDS[kind]
    shares, experts = choose_experts(x, weights, routing)
    x = x.double() if weights.into is None else x.double() @ weights.into.double()
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (each, places) in enumerate(zip(shares, experts, strict=True)):
        for share, place in zip(each.tolist(), places.tolist(), strict=True):
            parts = {
                name: part[place].double()
                for name in PARTS
                if (part := getattr(weights, name)) is not None
            }
            one = ExpertWeights(router=weights.router, **parts)
            row = x[token : token + 1]
            read, given = (share, 1.0) if routing.before else (1.0, share)
            (own,) = run_expert(read * row, one, routing, activation)
            out[token] += given * own.cpu()
    return out if weights.back is None else out @ weights.back.double().cpu()


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows} rows")
@pytest.mark.parametrize("kind", KINDS)
def test_chosen_experts_give_what_the_formula_says_and_others_are_not_read(
    kind: str, tile: Tile, device: str
) -> None:
    """Experts that no token chose hold NaN, which no product forgives."""
    activation, routing, count, _ = KINDS[kind]
    for tokens in (1, 2, 37):
        tensors = tensors_of(kind, device, tokens)
        weights = ExpertWeights(**tensors)
        x = without_ties(rows_of(tokens + 9, device, tokens), weights, kind)[:tokens]
        exact = expected(x, weights, kind)
        halves = run_experts(x, weights, routing, activation).double().cpu()
        read = set(choose_experts(x, weights, routing)[1].flatten().tolist())
        for part in weights.parts:
            part[sorted({*range(count)} - read)] = torch.nan
        found = grouped_of(tensors, kind).run(x, tile)
        assert found.dtype == x.dtype
        error = (found.double().cpu() - exact).abs().max()
        assert error <= max(LEAST, 1.5 * (halves - exact).abs().max())


def codes_of(shape: torch.Size, group: int, zeros: bool, seed: int) -> CodedWeight:
    """Any codes of a map [E, K, N]: of 4 bits in groups, or e4m3 where ``group`` is 0."""
    count, inputs, outputs = shape
    draw = torch.Generator().manual_seed(seed)

    def bytes_of(*size: int) -> Tensor:
        return torch.randint(0, 256, size, generator=draw).to(torch.uint8)

    if not group:
        codes = (bytes_of(count, outputs, 1, inputs) & 0xBF).view(torch.float8_e4m3fn)
        scales = torch.rand(count, outputs, 1, generator=draw) / 8
        return CodedWeight(codes, scales, None, 8)
    groups = -(-inputs // group)
    codes = bytes_of(count, outputs, groups, group // 2)
    scales = (torch.rand(count, outputs, groups, generator=draw) / 32).half()
    own = bytes_of(count, outputs, -(-groups // 2)) if zeros else None
    return CodedWeight(codes, scales, own, 4)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows} rows")
@pytest.mark.parametrize(
    ("group", "zeros"), [(0, False), (32, True), (64, False), (128, True)]
)
@pytest.mark.parametrize(
    "kind", ["softmax", "a plain MLP", "bounded", "weighed before", "of a latent"]
)
def test_codes_of_experts_are_the_numbers_that_they_stand_for(
    kind: str, group: int, zeros: bool, tile: Tile, device: str
) -> None:
    """Inputs that are no multiple of a group, and groups that are no pair."""
    if device == "cuda" and not group and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no e4m3")
    tensors = tensors_of(kind, device)
    coded = dict(tensors)
    for seed, role in enumerate(("up", "down", "gate")):
        if role not in tensors:
            continue
        shape = coded.pop(role).shape
        codes = codes_of(shape, group, zeros, seed)
        each = [one_of(codes, e) for e in range(shape[0])]
        numbers = torch.stack([one.matrix(shape[1]).T for one in each])
        tensors[role] = numbers.half().to(device)
        for name in ("codes", "scales", "zeros"):
            if (part := getattr(codes, name)) is not None:
                coded[f"{role}.{name}"] = part.to(device)
    weights = ExpertWeights(**tensors)
    x = without_ties(rows_of(21, device), weights, kind)
    exact = expected(x, weights, kind)
    found = grouped_of(coded, kind).run(x, tile).double().cpu()
    assert (found - exact).abs().max() <= 2e-3 * max(1.0, exact.abs().max().item())


def one_of(codes: CodedWeight, expert: int) -> CodedWeight:
    zeros = None if codes.zeros is None else codes.zeros[expert]
    return CodedWeight(codes.codes[expert], codes.scales[expert], zeros, codes.bits)


@pytest.mark.parametrize(
    "name", ["qwen2_moe", "gpt_oss", "glm4_moe", "nemotron_h-latent"]
)
def test_an_engine_of_codes_is_its_decoder_with_their_numbers(
    name: str,
    reference: Callable[[str], tuple[Path, torch.nn.Module]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Built, loaded and run on a GPU; the exporter's decoder is float32. Of some tokens
    halves choose other experts."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    library: Library = request.getfixturevalue("library")
    monkeypatch.setenv("KVLATHE_LIBRARY", str(library.path.resolve()))
    native.find.cache_clear()
    asked = BuildConfig(
        reference(name)[0],
        tmp_path / "engine",
        backend="cuda",
        dtype="float16",
        device="cpu",
        weights="int4",
        max_batch_size=2,
        max_seq_len=128,
        use_cache=False,
    )
    folder = build(asked)
    prompt = list(range(3, 90))
    with LLM.load(folder, cache_bytes=1 << 26) as llm:
        found = llm.logits(prompt, range(len(prompt)))
        formats = asked.weight_formats
        decoder = Decoder(
            Checkpoint(reference(name)[0]).spec, llm.plan, formats=formats
        )
    tensors = read_decoder(folder, DECODER_FILE, "cpu")[1]
    kinds = decoder.state_dict()
    decoder.load_state_dict({x: part.to(kinds[x].dtype) for x, part in tensors.items()})
    exact = decoder.logits(prompt, range(len(prompt))).numpy()
    errors = np.abs(found - exact).max(-1)
    assert np.quantile(errors, 0.85) <= 2e-2 * np.abs(exact).max()


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("kind", ["softmax", "one expert"])
def test_each_pair_has_one_row_in_a_tile_of_its_expert(
    kind: str, rows: int, device: str
) -> None:
    _, routing, count, _ = KINDS[kind]
    grouped = grouped_of(tensors_of(kind, device), kind)
    draw = torch.Generator().manual_seed(2)
    for tokens in (1, 5, 64, 150):
        size = (tokens, routing.chosen)
        # Some experts are asked for more often than others.
        experts = torch.randint(0, count, size, generator=draw)
        experts = torch.minimum(experts, torch.randint(0, count, size, generator=draw))
        places, owners = grouped.pairs.grouped(experts.int().to(device), rows)
        pairs = places.cpu().unflatten(0, (-1, rows)) - 1
        told = sorted(pairs[pairs >= 0].tolist())
        assert told == list(range(experts.numel()))
        asked = experts.flatten()
        for own, owner in zip(pairs, owners.tolist(), strict=True):
            chose = asked[own[own >= 0]]
            assert (chose == owner).all() and (len(chose) > 0) == (owner >= 0)


@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_are_routed_by_one_kernel_as_many_are(
    kind: str, device: str
) -> None:
    """Some tokens alike, so that experts own several tiles, and each number of them."""
    grouped = grouped_of(tensors_of(kind, device), kind)
    pairs, chosen = grouped.pairs, KINDS[kind][1].chosen
    x = rows_of(max(pairs.few, 1), device)
    x = without_ties(torch.cat([x[:1].expand(30, -1), x]), grouped.weights, kind)
    for tokens in (1, 2, pairs.few - 1, pairs.few):
        some = x[: max(tokens, 1)]
        shares, rows, owners = pairs.routed(some, 16)
        weights, experts = pairs.chosen(some)
        assert torch.allclose(shares, weights, rtol=1e-6, atol=1e-7)
        told = rows.cpu().unflatten(0, (-1, 16)) - 1
        assert sorted(told[told >= 0].tolist()) == list(range(len(some) * chosen))
        for own, owner in zip(told, owners.tolist(), strict=True):
            asked = experts.flatten().cpu()[own[own >= 0]]
            assert (asked == owner).all() and (len(asked) > 0) == (owner >= 0)


@pytest.mark.parametrize("tokens", [1, 9, 150])
def test_a_residual_is_added_as_after_the_experts(tokens: int, device: str) -> None:
    grouped = grouped_of(tensors_of("softmax", device), "softmax")
    x, residual = rows_of(tokens, device), rows_of(tokens, device, 2)
    assert torch.equal(grouped(x, residual), residual + grouped(x))


def test_rows_of_no_numbers_leave_others_as_they_are(device: str) -> None:
    grouped = grouped_of(tensors_of("softmax", device), "softmax")
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
    grouped = grouped_of(tensors_of("corrected", device), "corrected")
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


@pytest.mark.parametrize("reason", ["float32", "no Triton"])
def test_without_the_kernels_every_expert_computes_and_the_log_says_why(
    reason: str, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    activation, routing, _, _ = KINDS["softmax"]
    tensors, x = tensors_of("softmax", "cpu"), rows_of(5, "cpu")
    monkeypatch.setattr(grouped_experts, "KERNELS", "kvlathe.no_kernels_of_experts")
    if reason == "float32":
        tensors, x = {role: part.float() for role, part in tensors.items()}, x.float()
    told = {"float32": "float32", "no Triton": "no_kernels"}
    grouped_experts.tell.cache_clear()
    experts = [experts_map(tensors, routing, activation) for _ in range(3)]
    every = run_experts(x, ExpertWeights(**tensors), routing, activation)
    assert torch.equal(experts[0](x), every)
    (line,) = logged
    assert "every expert" in line and told[reason] in line


def test_codes_without_the_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    activation, routing, _, _ = KINDS["a plain MLP"]
    tensors = tensors_of("a plain MLP", "cpu")
    for role in ("up", "down"):
        codes = codes_of(tensors.pop(role).shape, 32, False, 0)
        tensors |= {f"{role}.codes": codes.codes, f"{role}.scales": codes.scales}
    monkeypatch.setattr(grouped_experts, "KERNELS", "kvlathe.no_kernels_of_experts")
    with pytest.raises(KvlatheError, match=r"no_kernels.*without --weights"):
        experts_map(tensors, routing, activation)


@pytest.mark.parametrize("most", [16, 64, 128])
def test_tiles_that_do_not_fit_a_gpu_are_left_out(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def run(
        _: GroupedExperts, x: Tensor, tile: Tile, residual: object = None
    ) -> Tensor:
        if tile.rows > most:
            raise RuntimeError("out of shared memory")
        ran.append(tile.rows)
        return x

    monkeypatch.setattr(grouped_experts, "KERNELS", "math")
    monkeypatch.setattr(GroupedExperts, "run", run)
    grouped = grouped_of(tensors_of("softmax", "cpu"), "softmax")
    grouped.try_out()
    assert ran == [tile.rows for tile in TILES if tile.rows <= most]
    grouped(rows_of(1, "cpu"))
    grouped(rows_of(4000, "cpu"))
    assert ran[-2:] == [16, most]
