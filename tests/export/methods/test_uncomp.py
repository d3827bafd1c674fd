"""Laws of token budgets by entropy: groups follow the votes, sizes the paper's
formulas, removed heads the likeness."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration import effective_ranks
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods.composition import CacheSettings, compose, verify
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.lives import Budget
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.stages import Stage
from tests.support import stats_cases
from tests.support.checkpoints import make_model
from tests.support.families.sizes import sizes

SHAPE = ModelShape(4, 8, 4, 64, 96, 50, 4096)


def stats(shape: ModelShape = SHAPE) -> Stats:
    """Head h has the effective rank of its number, but in layer 1, where it falls;
    hidden states fall before layer 2 by 3 and before layer 3 by half."""
    made = stats_cases.stats(0, shape)
    found = made.entropies
    rank = 1.0 + np.arange(shape.query_heads)
    found.queries[:] = rank[:, None]
    if shape.layers > 1:
        found.queries[:, 1] = rank[::-1, None]
    found.hidden[:] = np.array([9.0, 11.0, 8.0, 7.5])[: shape.layers, None]
    return made


def plan(request: str, made: Stats | None = None) -> CompressionPlan:
    made = made or stats()
    return compose(
        parse(request), made.shape, True, made, RankOptions(), CacheSettings(32)
    )[0]


def budgets(found: CompressionPlan) -> list[list[int]]:
    """[layer][head]: the budget of the group that a lane is in."""
    kept = {lane: group.life.most for group in found.groups for lane in group.lanes}
    heads = found.model.kv_heads
    return [
        [kept.get(layer * heads + h, 0) for h in range(heads)]
        for layer in range(found.model.layers)
    ]


def test_heads_of_higher_rank_keep_more_and_the_ablations_turn_it_around() -> None:
    up, down = [256, 256, 512, 512], [512, 512, 256, 256]
    assert budgets(plan("uncomp:stages=1")) == [up, down, up, up]
    assert budgets(plan("uncomp:stages=1,order=reversed")) == [down, up, down, down]
    drawn = budgets(plan("uncomp:stages=1,order=random"))
    assert all(sorted(row) == up for row in drawn)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [(1, [384] * 4), (2, [256, 256, 512, 512]), (4, [256, 320, 448, 512])],
)
def test_groups_share_the_spread_in_whole_pages_with_the_average_kept(
    groups: int, expected: list[int]
) -> None:
    assert budgets(plan(f"uncomp:stages=1,groups={groups}"))[0] == expected


def test_stages_begin_where_the_rank_falls_and_sizes_go_down_in_equal_steps() -> None:
    assert plan("uncomp").stages == (Stage(0), Stage(2, 1536))
    assert plan("uncomp:epsilon=0.2").stages == (
        Stage(0),
        Stage(2, 2816),
        Stage(3, 1536),
    )
    assert plan("uncomp:epsilon=4").stages == plan("uncomp:stages=1").stages == ()
    assert plan("uncomp:stages=3,least=1024").stages == (
        Stage(0),
        Stage(2, 2560),
        Stage(3, 1024),
    )
    for group in plan("uncomp").groups:
        assert len({lane // 4 >= 2 for lane in group.lanes}) == 1


def test_a_layer_with_a_single_kv_head_is_ranked_across_layers() -> None:
    shape = dataclasses.replace(SHAPE, kv_heads=1)
    made = stats(shape)
    made.entropies.queries[:] = np.array([3.0, 1.0, 4.0, 2.0])[:, None, None]
    assert budgets(plan("uncomp:stages=1", made)) == [[512], [256], [512], [256]]


def recent(found: CompressionPlan) -> set[int]:
    """The newest tokens that budgets keep."""
    lives = [group.life for group in found.groups]
    return {life.recent for life in lives if isinstance(life, Budget)}


def test_recent_tokens_take_the_share_whose_trend_fits_best() -> None:
    made = stats()
    made.entropies.keys[:] = np.array([1.0, 4.0, 2.0, 3.0])[:, None, None]
    made.entropies.windows[:] = np.array([4.0, 3.0, 2.0, 1.0])[:, None, None]
    made.entropies.windows[:, :, 2] = np.array([1.0, 4.0, 2.0, 3.0])[:, None]
    assert recent(plan("uncomp", made)) == {64, 128}
    assert recent(plan("uncomp:recent=0.5", made)) == {128, 256}
    assert plan("uncomp", made).notes["recent"] == effective_ranks.RECENT[2]


def test_removed_heads_are_those_of_least_rank_and_take_the_most_alike() -> None:
    made = stats()
    made.entropies.likeness[:] = np.eye(4)
    made.entropies.likeness[:, 0, 0, 2] = made.entropies.likeness[:, 0, 1, 3] = 0.9
    found = plan("uncomp:removed=2,stages=1", made)
    assert [lane.fill_from for lane in found.lanes[:4]] == [2, 3, None, None]
    assert [lane.head for lane in found.lanes[4:8] if lane.removed] == [
        2,
        3,
    ]  # layer 1 is the other way around
    assert budgets(found)[0] == [0, 0, 256, 512]


@pytest.mark.parametrize(
    "request_",
    ["uncomp+hack:bits=4", "hack:bits=4+uncomp:stages=1", "fdc+uncomp+hack:bits=2"],
)
def test_compositions_seal_into_a_cold_bucket_for_each_budget(request_: str) -> None:
    found = plan(request_)
    cold = [bucket for bucket in found.index.buckets if not bucket.is_hot]
    assert {bucket.life.most for bucket in cold} == {256, 512}
    assert all(bucket.tier.axis_v == "rank" for bucket in cold)
    assert all(group.seals for group in found.groups)
    assert parse(request_).calibration == "text"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("uncomp:budget=100", "a page holds 64"),
        ("uncomp:groups=5", "4 KV heads"),
        ("uncomp:removed=4", "up to 3"),
        ("uncomp:removed=1,groups=4", "3 KV heads"),
        ("uncomp:stages=5", "4 layers"),
        ("uncomp:k=33", "one of elbow, 16"),
        ("uncomp:order=entropi", "Did you mean entropy"),
        ("uncomp:bugdet=5", "Did you mean budget"),
        ("uncomp:budget=many", "a count of tokens"),
        ("uncomp:recent=2", "from 0 to 1"),
        ("uncomp:recent=nan", "from 0 to 1"),
        ("uncomp:epsilon=nan", "from 0 on"),
        ("uncomp:budget=1000000000000", "from 1 on"),
        ("uncomp:stages=2,least=4096", "none would leave"),
        ("uncomp+uncomp", "which tokens are kept"),
        ("uncomp+kivi", "by channel"),
        ("uncomp+hack:sums=stored", "sums=stored"),
    ],
)
def test_budgets_and_stages_that_cannot_be_are_refused(
    request_: str, said: str
) -> None:
    with pytest.raises(KvlatheError, match=said):
        plan(request_)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("uncomp:budget=128", "last group would keep 0 tokens.*spread=128 or less"),
        ("uncomp:budget=128", "budget=192 or more"),
        ("uncomp:groups=1,budget=32", "keep 32 tokens.*budget=64 or more"),
    ],
)
def test_a_group_that_would_keep_less_than_a_page_is_explained(
    request_: str, said: str
) -> None:
    with pytest.raises(KvlatheError, match=said):
        verify(parse(request_), RankOptions(), 64)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("uncomp:groups=5", "4 KV heads"),
        ("uncomp:removed=4", "up to 3"),
        ("uncomp:removed=1,groups=4", "3 KV heads"),
        ("uncomp:stages=5", "4 layers"),
        ("uncomp:stages=2,least=4096", "none would leave"),
    ],
)
def test_stages_that_no_such_model_can_have_are_refused_before_calibration(
    request_: str, said: str
) -> None:
    with pytest.raises(KvlatheError, match=said):
        parse(request_).check_model(stats().shape)


def test_a_share_of_the_bytes_is_refused_beside_a_budget() -> None:
    made = stats()
    with pytest.raises(KvlatheError, match="depends on the sequence's length"):
        compose(
            parse("uncomp+fdc"),
            made.shape,
            True,
            made,
            RankOptions(compression_ratio=0.3),
            CacheSettings(32),
        )


def test_a_removed_head_gives_the_output_of_the_one_that_fills_it(
    tmp_path: Path,
) -> None:
    """Against transformers, with the removed heads' attention output replaced before
    W_O."""
    model = make_model(
        tmp_path, "Llama", sizes(64, 4, 4, num_hidden_layers=2, attention_bias=True)
    )
    checkpoint = Checkpoint(tmp_path)
    made = stats_cases.stats(3, checkpoint.spec.shape)
    found, basis = compose(
        parse("uncomp:removed=2,stages=1"),
        made.shape,
        True,
        made,
        RankOptions(),
        CacheSettings(32),
    )
    d = made.shape.head_dim

    def refilled(layer: int):  # noqa: ANN202
        def hook(_module: object, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            o = inputs[0].clone()
            for lane in found.lanes[layer * 4 : layer * 4 + 4]:
                if lane.fill_from is not None:
                    source = slice(lane.fill_from * d, (lane.fill_from + 1) * d)
                    o[..., lane.head * d : (lane.head + 1) * d] = inputs[0][..., source]
            return (o,)

        return hook

    for layer, block in enumerate(model.model.layers):
        block.self_attn.o_proj.register_forward_pre_hook(refilled(layer))
    ids = torch.randint(97, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    ours = decoder_from(checkpoint, found, basis).logits(ids.tolist(), range(40))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert sum(lane.removed for lane in found.lanes) == 4
