"""A plan that seals, scored before it is built: SealedAttend against the paged engine
and against the codec."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search import sealed
from kvlathe.plan import codec
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL, Divide
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from tests.support.attend_cases import plan_of
from tests.support.runtime_cases import MODEL, decoder, llm, model_shape, plans, text

PAGE = 64
TURNED = 5e-4
"""Root mean square of what codes that turn make of logits."""


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def one_lane(
    tier: Tier, rank_k: int, rank_v: int, page: int, seed: int
) -> CompressionPlan:
    lanes = (Lane(0, 0, rank_k, rank_k, rank_v, "none"),)
    groups = (Group((0,), Tier(32, 32), (tier,), SEAL),)
    shape = ModelShape(1, 2, 1, max(rank_k, rank_v), 64, 97, 256)
    return CompressionPlan(shape, lanes, groups, page, page, seed)


bits, axes, groups = (
    st.sampled_from([8, 4, 2, 16]),
    st.sampled_from(["rank", "token"]),
    st.sampled_from([32, 64, 128]),
)
tiers = st.builds(
    Tier,
    bits,
    bits,
    axes,
    axes,
    groups,
    groups,
    rounding=st.sampled_from(["nearest", "stochastic"]),
    span_k=st.sampled_from([1.0, 0.65]),
)


@settings(max_examples=60)
@given(
    tiers,
    st.sampled_from([16, 48, 80, 144]),
    st.sampled_from([16, 64]),
    st.sampled_from([16, 64]),
    st.integers(0, 99),
)
def test_sealed_numbers_in_torch_are_those_of_the_codec(
    tier: Tier, rank_k: int, rank_v: int, page: int, seed: int
) -> None:
    plan, rng = one_lane(tier, rank_k, rank_v, page, seed), np.random.default_rng(seed)
    wide = (
        rng.normal(size=(3 * page, rank)) * 10.0 ** rng.integers(-3, 4)
        for rank in (rank_k, rank_v)
    )
    sides = [x.astype(np.float32) for x in wide]
    sides[0][: page // 2] = 0.25  # constant groups
    found = sealed.Seal(plan, plan.lanes[0], tier)(*map(torch.from_numpy, sides))
    layout = CacheLayout(plan)
    for part, given_side, read in zip(
        codec.matrices(layout, 1)[0], sides, found, strict=True
    ):
        for at in range(0, 3 * page, page):
            row = np.zeros(layout.page_stride[1], np.uint8)
            part.write(row, given_side[at : at + page], at)
            expected = part.read(row) if part.groups else given_side[at : at + page]
            np.testing.assert_array_equal(read[at : at + page].numpy(), expected)


def test_sealed_values_that_lie_in_keys_are_read_there() -> None:
    """Groups of keys end elsewhere than groups of values alone would."""
    tier, page = Tier(4, 4, "rank", "rank", 64, 64), 16
    lane = Lane(0, 0, 144, 144, 80, "none", values_in_keys=True)
    groups = (Group((0,), Tier(16, 16), (tier,), SEAL),)
    plan = plan_of([lane], groups, 144, 2, page)
    keys = torch.randn(2 * page, 144, generator=torch.manual_seed(1))
    k, v = sealed.Seal(plan, lane, tier)(keys, keys[:, :80])
    layout = CacheLayout(plan)
    (parts,) = codec.matrices(layout, 1).values()
    row = np.zeros(layout.page_stride[1], np.uint8)
    parts[0].write(row, keys[:page].numpy())
    for part, read in zip(parts, (k, v), strict=True):
        np.testing.assert_array_equal(read[:page].numpy(), part.read(row))


@pytest.mark.parametrize("backend", ["torch", "onnx"])
@pytest.mark.parametrize("kind", ["sealed", "coded", "sealed after", "sealed split"])
def test_a_plan_is_scored_as_its_engine_computes(kind: str, backend: str) -> None:
    """200 tokens end within a page, so tokens see their own page hot and all others as
    codes. A number on the border of two codes may fall to either side (test_seal.py):
    rarely, unless queries and shares are codes too.
    """
    scored = sealed.reading(
        decoder_from(Checkpoint(MODEL), plans(model_shape())[kind], Basis())
    )
    found = scored.logits(text(200), range(200)).numpy()
    difference = np.abs(found - llm(backend, kind).logits(text(200), range(200)))
    rms, most = (5e-3, 0.5) if kind == "coded" else (1e-3, 2e-2)
    assert np.sqrt((difference**2).mean()) < rms and difference.max() < most
    unsealed = np.abs(found - decoder("one").logits(text(200), range(200)).numpy())
    assert np.sqrt((unsealed**2).mean()) > (1e-4 if kind == "sealed split" else 1e-3)


@pytest.mark.parametrize(
    "kind", ["aged", "aged codes", "aged windows", "aged codes behind a window"]
)
def test_pages_of_every_age_are_scored_as_their_engine_reads_them(kind: str) -> None:
    """Of the 4-bit codes of older pages more fall to the other side of a border."""
    plan = plans(model_shape())[kind]
    scored = sealed.reading(decoder_from(Checkpoint(MODEL), plan, Basis()))
    found = scored.logits(text(340), range(340)).numpy()
    difference = np.abs(found - llm("torch", kind).logits(text(340), range(340)))
    rms, most = (5e-3, 0.5) if "codes" in kind else (2e-3, 0.1)
    assert np.sqrt((difference**2).mean()) < rms and difference.max() < most
    few = scored.logits(text(340), [339, 200, 3]).numpy()
    assert np.abs(few - found[[339, 200, 3]]).max() < 1e-3
    for place in range(2):
        alike = tuple(
            dataclasses.replace(group, cold=(group.cold[place],) * 2)
            for group in plan.groups
        )
        other = dataclasses.replace(plan, groups=alike)
        elsewhere = sealed.reading(decoder_from(Checkpoint(MODEL), other, Basis()))
        last = elsewhere.logits(text(340), range(260, 340)).numpy()
        assert np.sqrt(((last - found[260:]) ** 2).mean()) > 2 * rms


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128])
def test_every_length_has_its_own_last_page(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows of a long sequence are taken page by page. Products of other
    sizes differ in their last bits, so a number on the border of two codes may turn: by
    less than a page that is read hot and not as codes."""
    scored = sealed.reading(
        decoder_from(Checkpoint(MODEL), plans(model_shape())["sealed"], Basis())
    )
    at_once = scored.logits(text(tokens), range(tokens))
    longer = scored.logits(text(160), range(tokens))
    assert rms(at_once - longer) < TURNED
    monkeypatch.setattr(sealed, "SCORES_AT_ONCE", 1)
    assert rms(scored.logits(text(tokens), range(tokens)) - at_once) < TURNED
    if tokens > PAGE:
        hot = decoder("one").logits(text(tokens), range(tokens))
        assert rms((at_once - hot)[PAGE:]) > 2 * TURNED


def test_a_plan_that_chooses_tokens_is_refused() -> None:
    shape = model_shape()
    plan = plans(shape)["sealed"]
    (group,) = plan.groups
    halves = dataclasses.replace(group, cold=2 * group.cold, life=Divide((0.5, 0.5)))
    chosen = dataclasses.replace(
        plan, groups=(halves,), score=ObservationWindow(last=8)
    )
    with pytest.raises(KvlatheError, match="chooses tokens"):
        sealed.reading(decoder_from(Checkpoint(MODEL), chosen, Basis()))


@pytest.mark.parametrize(
    "kind",
    [
        "one",
        "sealed",
        "coded",
        "sealed split",
        "windowed",
        "sealed windows",
        "aged",
        "aged windows",
    ],
)
def test_the_last_layer_computes_only_what_is_asked(kind: str) -> None:
    """Few places are as they are among all."""
    plan = plans(model_shape())[kind]
    scored = sealed.reading(decoder_from(Checkpoint(MODEL), plan, Basis()))
    every = scored.logits(text(200), range(200))
    for rows in ([199], [3, 64, 70, 130, 131], [150, 20, 150]):
        few = scored.logits(text(200), rows)
        torch.testing.assert_close(few, every[rows], rtol=1e-4, atol=1e-4)
