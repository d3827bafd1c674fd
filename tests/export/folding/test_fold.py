"""Folding: a change of basis at full rank changes nothing; what is dropped or filled
equals a plain reference."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.folding.fold import decoder_from, fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.layer_runner import LayerRunner, embed
from kvlathe.plan.plan import CompressionPlan
from tests.support.checkpoints import (
    OWN_HEADS,
    make,
    make_model,
    random_basis,
    whole_plan,
)
from tests.support.families.sizes import sizes
from tests.support.nightly import rest_nightly

TOLERANCE = 1e-4
Reference = Callable[[str], tuple[Path, torch.nn.Module]]


def ids_for(checkpoint: Checkpoint, length: int = 60) -> list[int]:
    return torch.randint(
        0,
        checkpoint.spec.vocab_size,
        (length,),
        generator=torch.Generator().manual_seed(1),
    ).tolist()


def expected_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", OWN_HEADS)
@pytest.mark.parametrize(
    ("projected", "orthogonal"),
    rest_nightly(
        itertools.product([True, False], [True, False]), (True, False), (False, True)
    ),
)
def test_a_full_rank_basis_with_centres_changes_nothing(
    name: str, orthogonal: bool, projected: bool, reference: Reference
) -> None:
    folder, model = reference(name)
    checkpoint = Checkpoint(folder)
    plan = whole_plan(checkpoint.spec, projected)
    decoder = decoder_from(checkpoint, plan, random_basis(plan, 7, orthogonal))
    ids = ids_for(checkpoint, 70)
    torch.testing.assert_close(
        decoder.logits(ids, range(70)),
        expected_logits(model, ids),
        atol=TOLERANCE,
        rtol=0,
    )


def plane_scales(plan: CompressionPlan) -> Basis:
    """A factor for each RoPE plane of every lane's queries, its inverse for the
    keys."""
    rng, basis = np.random.default_rng(3), Basis()
    for lane in plan.lanes:
        factors = np.tile(rng.uniform(0.2, 5, plan.model.head_dim // 2), 2)
        basis[lane.layer, lane.head] = LaneBasis(
            a=np.diag(factors), b=np.diag(1 / factors)
        )
    return basis


@pytest.mark.parametrize("name", [name for name in OWN_HEADS if "gpt2" not in name])
def test_factors_of_planes_fold_through_rope(name: str, reference: Reference) -> None:
    folder, model = reference(name)
    checkpoint = Checkpoint(folder)
    if checkpoint.spec.rope is None or "q_norm" in checkpoint.spec.family.names:
        return  # any basis folds, or none
    plan, ids = whole_plan(checkpoint.spec), ids_for(checkpoint, 70)
    decoder = decoder_from(checkpoint, plan, plane_scales(plan))
    name = f"layers.{plan.lanes[0].layer}.k.weight"
    assert not plan.index.projected and not torch.equal(
        decoder.state_dict()[name], checkpoint.weight(name)
    )
    torch.testing.assert_close(
        decoder.logits(ids, range(70)),
        expected_logits(model, ids),
        atol=TOLERANCE,
        rtol=0,
    )


@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    half=st.integers(2, 24),
    kind=st.sampled_from(["Llama", "Qwen2", "Qwen3", "Phi3"]),
    projected=st.booleans(),
    seed=st.integers(0, 99),
)
def test_folding_at_full_rank_changes_no_logit_of_any_shape(
    kv_heads: int,
    group: int,
    half: int,
    kind: str,
    projected: bool,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("shape")
    heads, head_dim = kv_heads * group, 2 * half
    hidden = heads * head_dim if kind == "Phi3" else heads * 6
    extra = (
        {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if kind == "Phi3"
        else {}
    )
    model = make_model(
        folder, kind, sizes(hidden, heads, kv_heads, head_dim, **extra), seed
    )
    checkpoint = Checkpoint(folder)
    plan = whole_plan(checkpoint.spec, projected=projected)
    decoder = decoder_from(checkpoint, plan, random_basis(plan, seed, True))
    ids = ids_for(checkpoint, 20)
    torch.testing.assert_close(
        decoder.logits(ids, range(20)),
        expected_logits(model, ids),
        atol=TOLERANCE,
        rtol=0,
    )


@pytest.mark.parametrize("name", OWN_HEADS)
def test_the_identity_plan_leaves_every_weight_as_it_was(
    name: str, reference: Reference
) -> None:
    checkpoint = Checkpoint(reference(name)[0])
    spec = checkpoint.spec
    plan = whole_plan(spec)
    state = dict(fold(checkpoint, plan, Basis()))
    assert state.keys() == Decoder(checkpoint.spec, plan).state_dict().keys()
    for weight in checkpoint.weights:
        folded, role = state[weight], weight.split(".")[-2]
        layer = int(weight.split(".")[1]) if weight.startswith("layers.") else 0
        d = spec.heads(layer).head_dim
        rank = -(-d // 16) * 16
        if role == "v" and not spec.family.value_norm:
            folded = folded.unflatten(-1, (-1, rank))[..., :d].flatten(-2)
        if weight.endswith(".o.weight"):
            folded = folded.unflatten(0, (-1, rank))[:, :d].flatten(0, 1)
        assert torch.equal(folded, checkpoint.weight(weight)), weight


@pytest.mark.parametrize(
    "name",
    [
        "llama-biased-d80-mqa",
        "qwen3",
        "phi4-mini-partial",
        "falcon-40b",
        "gpt2",
        "falcon-7b",
    ],
)
@pytest.mark.parametrize("orthogonal", [True, False])
def test_truncation_equals_attention_on_projected_heads(
    name: str, orthogonal: bool, reference: Reference
) -> None:
    """Ranks below full: the decoder against the original layers with q a b^T k and v
    a_v o_v put between."""
    checkpoint = Checkpoint(reference(name)[0])
    rope = checkpoint.spec.rope is not None
    plan, basis = truncated(whole_plan(checkpoint.spec, projected=rope), orthogonal)
    ids = ids_for(checkpoint)
    expected = plain_forward(checkpoint, plan, basis, ids)
    found = decoder_from(checkpoint, plan, basis).logits(ids, range(len(ids)))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["Llama", "Afmoe"])
def test_a_removed_lane_is_filled_from_its_keeper(kind: str, tmp_path: Path) -> None:
    """Layer 0 loses head 1 (filled from 2), layer 1 heads 0 and 2 (from 1), at
    truncated ranks and with centres; also where gates multiply outputs."""
    settings = sizes(66, 6, 3, 32, attention_bias=True)
    if kind == "Afmoe":
        settings |= {"num_dense_layers": 2, "global_attn_every_n_layers": 9}
    make_model(tmp_path, kind, settings)
    checkpoint = Checkpoint(tmp_path)
    plan, basis = truncated(whole_plan(checkpoint.spec, projected=True), True)
    fills = {(0, 1): 2, (1, 0): 1, (1, 2): 1}
    lanes = tuple(
        dataclasses.replace(x, rank_k=0, rank_v=0, fill_from=source)
        if (source := fills.get((x.layer, x.head)))
        else x
        for x in plan.lanes
    )
    kept = tuple(i for i, lane in enumerate(lanes) if not lane.removed)
    group = dataclasses.replace(plan.groups[0], lanes=kept)
    plan = dataclasses.replace(plan, lanes=lanes, groups=(group,))
    for place in fills:
        del basis[place]
    ids = ids_for(checkpoint)
    found = decoder_from(checkpoint, plan, basis).logits(ids, range(len(ids)))
    torch.testing.assert_close(
        found, plain_forward(checkpoint, plan, basis, ids), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("name", ["llama", "phi4-mini-partial", "llama-llama3-tied"])
def test_chosen_planes_equal_zeroing_the_others(
    name: str, projected: bool, reference: Reference
) -> None:
    """Each lane keeps its own planes; all planes but those are zeroed in the
    reference's q and k."""
    checkpoint = Checkpoint(reference(name)[0])
    d, rng = checkpoint.spec.head_dim, np.random.default_rng(3)
    plan, basis, zeroing = whole_plan(checkpoint.spec), Basis(), Basis()
    lanes = []
    for lane in plan.lanes:
        planes = tuple(sorted(rng.choice(d // 2, 8, replace=False).tolist()))
        dims = [*planes, *(p + d // 2 for p in planes)]
        mask = np.zeros(d)
        mask[dims] = 1
        centre = rng.normal(size=16) if projected else None
        turn = np.linalg.qr(rng.normal(size=(16, 16)))[0] if projected else None
        basis[lane.layer, lane.head] = LaneBasis(a=turn, b=turn, centre_k=centre)
        zeroing[lane.layer, lane.head] = LaneBasis(a=np.diag(mask), b=np.diag(mask))
        kept = {
            "input_dim": 16,
            "rank_k": 16,
            "rope": "planes",
            "planes": planes,
            "projected": projected,
        }
        lanes.append(dataclasses.replace(lane, **kept))
    ids = ids_for(checkpoint)
    smaller = dataclasses.replace(plan, lanes=tuple(lanes))
    found = decoder_from(checkpoint, smaller, basis).logits(ids, range(len(ids)))
    torch.testing.assert_close(
        found, plain_forward(checkpoint, plan, zeroing, ids), atol=TOLERANCE, rtol=0
    )


def test_lanes_of_different_ranks_and_projections_meet_in_one_layer(
    tmp_path: Path,
) -> None:
    make_model(tmp_path, "Llama", sizes(66, 6, 3, 48))
    checkpoint = Checkpoint(tmp_path)
    plan, basis = truncated(
        whole_plan(checkpoint.spec, projected=True), True, ranks=(16, 48, 32)
    )
    lanes = tuple(dataclasses.replace(x, projected=x.rank_k < 48) for x in plan.lanes)
    for lane in lanes:
        if not lane.projected:
            place = lane.layer, lane.head
            basis[place] = dataclasses.replace(
                basis[place], a=None, b=None, centre_k=None
            )
    plan, ids = dataclasses.replace(plan, lanes=lanes), ids_for(checkpoint)
    found = decoder_from(checkpoint, plan, basis).logits(ids, range(len(ids)))
    torch.testing.assert_close(
        found, plain_forward(checkpoint, plan, basis, ids), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "falcon-40b", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_errs_at_most_twice_as_much_as_transformers(
    name: str, dtype: torch.dtype, reference: Reference
) -> None:
    """Both sides against float32: ours with a random rotation of every lane, theirs as
    it is."""
    folder, model = reference(name)
    checkpoint = Checkpoint(folder)
    rope, ids = checkpoint.spec.rope is not None, ids_for(checkpoint)
    plan = whole_plan(checkpoint.spec, projected=rope, bits=16)
    found = decoder_from(checkpoint, plan, random_basis(plan, 2, True), dtype).logits(
        ids, range(len(ids))
    )
    exact, rounded = (
        expected_logits(model, ids),
        expected_logits(copy.deepcopy(model).to(dtype), ids).float(),
    )
    assert (found - exact).square().mean() <= 4 * (rounded - exact).square().mean()


def test_a_fold_refuses_bases_that_a_lane_cannot_have(tmp_path: Path) -> None:
    make(tmp_path, "qwen3")
    checkpoint = Checkpoint(tmp_path)
    plan = whole_plan(checkpoint.spec)
    d = checkpoint.spec.head_dim
    planes = {
        "rope": "planes",
        "planes": tuple(range(8)),
        "input_dim": 16,
        "rank_k": 16,
    }
    cases = [
        (planes, LaneBasis(), "QK-norm"),
        ({"rope": "none"}, LaneBasis(), "RoPE"),
        ({}, LaneBasis(centre_k=np.ones(d)), "not projected"),
        (
            {},
            LaneBasis(
                a=np.diag(np.arange(1.0, d + 1)), b=np.diag(1 / np.arange(1.0, d + 1))
            ),
            "not projected",
        ),
        ({}, LaneBasis(a=2 * np.eye(d), b=np.eye(d) / 2), "QK-norm"),
        ({"rank_v": 32}, LaneBasis(), "no a_v"),
        ({}, LaneBasis(a_v=np.eye(d)), "alone"),
        ({}, LaneBasis(a_v=np.eye(d), o_v=np.full((d, d), np.nan)), "NaN"),
        (
            {"projected": True},
            LaneBasis(a=np.eye(d + 1), b=np.eye(d + 1)),
            "the plan has",
        ),
        ({}, LaneBasis(centre_v=np.ones(d - 1)), "centre_v"),
    ]
    for change, given_basis, said in cases:
        changed = dataclasses.replace(
            plan, lanes=(dataclasses.replace(plan.lanes[0], **change), *plan.lanes[1:])
        )
        with pytest.raises(KvlatheError, match=said):
            fold(checkpoint, changed, Basis({(0, 0): given_basis}))
    foreign = dataclasses.replace(
        plan, model=dataclasses.replace(plan.model, vocab_size=5)
    )
    with pytest.raises(KvlatheError, match="Plan for this checkpoint"):
        fold(checkpoint, foreign, Basis())


def test_a_basis_comes_back_from_its_file(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    plan = whole_plan(Checkpoint(tmp_path).spec, projected=True)
    basis = random_basis(plan, 1, False)
    basis[0, 0] = LaneBasis(a_v=np.eye(3), o_v=np.eye(3))
    basis.save(tmp_path / "basis.npz")
    loaded = Basis.load(tmp_path / "basis.npz")
    assert loaded.keys() == basis.keys()
    for place, lane in basis.items():
        for field in dataclasses.fields(lane):
            a, b = getattr(lane, field.name), getattr(loaded[place], field.name)
            assert (a is None) == (b is None)
            assert a is None or b is None or np.array_equal(a, b)
    (tmp_path / "basis.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(KvlatheError, match="cannot be read"):
        Basis.load(tmp_path / "basis.npz")


# -- references ------------------------------------------------------------------------


def truncated(
    plan: CompressionPlan, orthogonal: bool, ranks: tuple[int, ...] = (16,)
) -> tuple[CompressionPlan, Basis]:
    """Lanes cut to ``ranks`` in turn (never above their own), with the first columns of
    a random full-rank basis."""
    basis, lanes = random_basis(plan, 5, orthogonal), []
    for i, lane in enumerate(plan.lanes):
        place, rank = (lane.layer, lane.head), ranks[i % len(ranks)]
        full = basis[place]
        a, b, a_v, o_v = full.a, full.b, full.a_v, full.o_v
        assert a is not None and b is not None and a_v is not None and o_v is not None
        basis[place] = dataclasses.replace(
            full, a=a[:, :rank], b=b[:, :rank], a_v=a_v[:, :rank], o_v=o_v[:rank]
        )
        inputs = rank if lane.rope == "none" else lane.input_dim
        lanes.append(
            dataclasses.replace(lane, rank_k=rank, rank_v=rank, input_dim=inputs)
        )
    return dataclasses.replace(plan, lanes=tuple(lanes)), basis


def plain_forward(
    checkpoint: Checkpoint, plan: CompressionPlan, basis: Basis, ids: list[int]
) -> torch.Tensor:
    """Layer by layer with the original weights; attention as its formula says, head by
    head, in float64."""
    spec, positions = checkpoint.spec, torch.arange(len(ids))
    x = embed(checkpoint, torch.tensor(ids), positions)
    for i in range(spec.layers):
        runner = LayerRunner(checkpoint, i)
        observed = runner._layer.attend
        assert observed is not None
        attention = PlainAttention(spec.scale(i), plan, basis, i, observed)
        runner._layer.attend = attention
        x = runner(x, positions).hidden
    bias = checkpoint.weight("norm.bias") if checkpoint.has("norm.bias") else None
    scale, eps = checkpoint.weight("norm.weight"), spec.family.norm_eps
    x = (
        F.layer_norm(x, x.shape[-1:], scale, bias, eps)
        if bias is not None
        else F.rms_norm(x, x.shape[-1:], scale, eps)
    )
    return x @ (
        checkpoint.weight("embed.weight").T
        if spec.tied_head
        else checkpoint.weight("head.weight")
    )


class PlainAttention(torch.nn.Module):
    def __init__(
        self,
        scale: float,
        plan: CompressionPlan,
        basis: Basis,
        layer: int,
        observed: torch.nn.Module,
    ) -> None:
        super().__init__()
        self.scale, self.plan, self.basis, self.layer, self.observed = (
            scale,
            plan,
            basis,
            layer,
            observed,
        )

    def forward(
        self, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        _, (q, k, v, o) = self.observed(*inputs)
        group = self.plan.model.group_size
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        outputs = []
        for head in range(self.plan.model.kv_heads):
            filler = self.plan.index.lane(self.layer, head).fill_from
            lane = head if filler is None else filler
            keys, values = self.cached(
                k[:, lane].double(),
                v[:, lane].double(),
                self.basis.get((self.layer, lane)),
            )
            for g in range(group):
                scores = (
                    q[:, lane * group + g].double() @ keys.T * self.scale
                ).masked_fill(later, -torch.inf)
                outputs.append(scores.softmax(-1) @ values)
        return torch.cat(outputs, -1).float(), (q, k, v, o)

    def cached(
        self, k: torch.Tensor, v: torch.Tensor, lane: LaneBasis | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k and v that attention sees through the lane's basis, brought back to the
        full dims."""
        if lane is None:
            return k, v
        array = {
            field.name: getattr(lane, field.name) for field in dataclasses.fields(lane)
        }
        m = {
            name: torch.from_numpy(value)
            for name, value in array.items()
            if value is not None
        }
        if "a" in m:
            k = (k - m.get("centre_k", torch.zeros(k.shape[1]))) @ m["b"] @ m["a"].T
        if "a_v" in m:
            centre = m.get("centre_v", torch.zeros(v.shape[1]))
            v = (v - centre) @ m["a_v"] @ m["o_v"] + centre
        return k, v
