"""Heads dealt to shards as vLLM cuts them: every shard's blocks have equal bytes, its
share of the checkpoint is that of its heads, and together shards attend what one
attends."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.lives import SEAL
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.library import find
from tests.support.block_cases import plan_of

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from kvlathe_vllm.calls import Calls, Step  # noqa: E402
from kvlathe_vllm.cpu import CpuLayer  # noqa: E402
from kvlathe_vllm.dealt import Dealt, lane_sizes, largest  # noqa: E402
from kvlathe_vllm.hosted import Hosted  # noqa: E402
from kvlathe_vllm.layer import Most  # noqa: E402
from tests.integrations.vllm.test_calls import heads_of  # noqa: E402

PAGE, DIMS, LAYERS, HIDDEN = 16, 32, 2, 24
MOST = 1.1
"""Bytes of the largest shard, over those in the best order."""
PREFIX = "model.layers.{}.self_attn."


def plan_with(
    heads: int, group: int, seed: int, alike: bool = False
) -> CompressionPlan:
    """Ranks and bits by chance; ``alike``: those of every head the same."""
    random = np.random.default_rng(seed)
    shape = ModelShape(LAYERS, heads * group, heads, DIMS, HIDDEN, 100, 1024)
    lanes: list[Lane] = []
    for layer, head in itertools.product(range(LAYERS), range(heads)):
        k, v = (DIMS, DIMS) if alike else (16 * random.integers(1, 3, 2)).tolist()
        lanes.append(Lane(layer, head, DIMS, k, v, "none", (), not alike))
    every = tuple(range(len(lanes)))
    eight = tuple(i for i in every if alike or random.random() < 0.5)
    four = tuple(i for i in every if i not in eight)
    coded = (
        (eight, Tier(8, 8, group_v=16)),
        (four, Tier(4, 4, group_k=16, group_v=16)),
    )
    groups = [Group(own, Tier(16, 16), (tier,), SEAL) for own, tier in coded if own]
    return CompressionPlan(shape, tuple(lanes), tuple(groups), PAGE, PAGE)


def engine_with(plan: CompressionPlan, seed: int = 0) -> Hosted:
    return Hosted(Path("engine"), plan, heads_of(plan, seed))


def cut(x: Tensor, shard: int, num_shards: int) -> Tensor:
    """As vLLM's column-parallel layers cut rows: the shard's part, or the one that it
    shares with others."""
    return x.chunk(num_shards)[shard]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Hosted, int]:
    heads, group = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([2, 4]))
    num_shards = draw(st.sampled_from([2, 4, 8]))
    num_shards = min(num_shards, heads * group)
    alike = draw(st.booleans())
    plan = plan_with(heads, group, draw(st.integers(0, 1 << 20)), alike)
    return engine_with(plan), num_shards


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_blocks_have_equal_bytes_and_hold_every_head(case: tuple[Hosted, int]) -> None:
    whole, num_shards = case
    dealt, heads = Dealt(whole, num_shards), whole.plan.model.kv_heads
    for layer in range(LAYERS):
        sizes = {engine.token_bytes(layer) for engine in dealt.engines}
        own = [engine.blocks[layer].token_bytes for engine in dealt.engines]
        assert sizes == {max(own)}
        copies = max(1, num_shards // heads)
        found = [x.head for one in dealt.engines for x in one.plan.index.active(layer)]
        assert sorted(found) == sorted(list(range(heads)) * copies)
        assert found[::copies] == list(dealt.orders[layer])
    assert dealt.padding >= 1


@pytest.mark.parametrize("num_shards", [2, 4])
def test_heads_are_dealt_so_that_the_largest_shard_is_nearly_least(
    num_shards: int,
) -> None:
    """Every layer is compared with every order that there is."""
    for seed in range(12):
        whole = engine_with(plan_with(4, 2, seed))
        sizes = lane_sizes(whole.plan)
        for layer, order in enumerate(Dealt(whole, num_shards).orders):
            own = sizes[4 * layer : 4 * layer + 4]
            every = [
                largest(own, num_shards, x) for x in itertools.permutations(range(4))
            ]
            found = largest(own, num_shards, order)
            assert found <= largest(own, num_shards, range(4))
            assert found <= MOST * min(every)


def checkpoint(plan: CompressionPlan, fused: bool) -> dict[str, Tensor]:
    """Attention whose tensors say, in each row of a head, which head it is."""
    model = plan.model
    q = torch.arange(model.query_heads).repeat_interleave(DIMS)
    kv = torch.arange(model.kv_heads).repeat_interleave(DIMS)
    tensors = {"model.embed_tokens.weight": torch.randn(100, HIDDEN)}
    for layer in range(LAYERS):
        rows = {"qkv": torch.cat([q, kv, kv])} if fused else {"q": q, "k": kv, "v": kv}
        at = PREFIX.format(layer)
        for name, heads in rows.items():
            tensors[f"{at}{name}_proj.weight"] = heads[:, None].expand(-1, HIDDEN)
            tensors[f"{at}{name}_proj.bias"] = heads
        tensors[f"{at}o_proj.weight"] = q.expand(HIDDEN, -1)
        tensors[f"{at}o_proj.bias"] = torch.arange(HIDDEN)
        tensors[f"{at}sinks"] = torch.arange(model.query_heads)
        tensors[f"{at}q_norm.weight"] = torch.arange(DIMS)
        tensors[f"{at}rotary_emb.inv_freq"] = torch.arange(DIMS // 2)
    return tensors


@settings(max_examples=40, deadline=None)
@given(case=cases(), fused=st.booleans())
def test_a_rank_reads_the_weights_of_its_heads(
    case: tuple[Hosted, int], fused: bool
) -> None:
    whole, num_shards = case
    dealt, model = Dealt(whole, num_shards), whole.plan.model
    kv, group = model.kv_heads, model.group_size
    tensors = checkpoint(whole.plan, fused)
    read = dict(dealt.arranged(tensors.items()))
    assert read.keys() == tensors.keys()
    for name in tensors:
        if "norm" in name or "rotary" in name or "embed" in name:
            assert torch.equal(read[name], tensors[name])
    copies, each = max(1, num_shards // kv), model.query_heads // num_shards
    sizes = [model.query_heads * DIMS, kv * DIMS, kv * DIMS]
    for layer in range(LAYERS):
        own = {k.removeprefix(PREFIX.format(layer)): x for k, x in read.items()}
        if fused:
            for kind in ("weight", "bias"):
                for part, x in zip(
                    "qkv", own[f"qkv_proj.{kind}"].split(sizes), strict=True
                ):
                    own[f"{part}_proj.{kind}"] = x
        assert torch.equal(own["o_proj.bias"], torch.arange(HIDDEN))
        for shard, engine in enumerate(dealt.engines):
            heads = [lane.head for lane in engine.plan.index.active(layer)]
            queries = [h * group + g for h in heads for g in range(group)]
            if copies > 1:
                first = shard % copies * each
                queries = queries[first : first + each]
            assert cut(own["sinks"], shard, num_shards).tolist() == queries
            for kind in ("weight", "bias"):
                assert (
                    heads_in(cut(own[f"q_proj.{kind}"], shard, num_shards)) == queries
                )
                for name in ("k_proj", "v_proj"):
                    x = own[f"{name}.{kind}"]
                    part = cut(x, shard // copies, min(kv, num_shards))
                    assert heads_in(part) == heads
            assert heads_in(cut(own["o_proj.weight"].T, shard, num_shards)) == queries


def heads_in(rows: Tensor) -> list[int]:
    """The heads that these rows are of, all rows of each."""
    numbers = rows if rows.ndim == 1 else rows[:, 0]
    by_head = numbers.unflatten(0, (-1, DIMS))
    assert (by_head == by_head[:, :1]).all()
    return by_head[:, 0].tolist()


@pytest.mark.skipif(find().native is None, reason="no native library")
@settings(max_examples=15, deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_shards_attend_what_one_attends(case: tuple[Hosted, int], seed: int) -> None:
    """A prompt of pages and a half, then a token, in every layer."""
    whole, num_shards = case
    model = whole.plan.model
    group = model.group_size
    dealt = Dealt(whole, num_shards)
    random = np.random.default_rng(seed)
    for layer in range(LAYERS):
        q, k, v = (
            torch.from_numpy(random.standard_normal((2 * PAGE + 9, n, DIMS))).float()
            for n in (model.query_heads, model.kv_heads, model.kv_heads)
        )
        want = attended(whole, layer, q, k, v)
        for shard, engine in enumerate(dealt.engines):
            heads = [lane.head for lane in engine.plan.index.active(layer)]
            each = model.query_heads // num_shards
            first = shard % max(1, num_shards // model.kv_heads) * each
            queries = [h * group + g for h in heads for g in range(group)]
            queries = queries[first : first + each] if len(heads) == 1 else queries
            got = attended(engine, layer, q[:, queries], k[:, heads], v[:, heads])
            # Products of other sizes round otherwise; another head gives about 1.
            assert (got - want[:, queries]).abs().max() < 0.02


def attended(engine: Hosted, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """o [T, heads, d] of one sequence; all but its last token come in a first step."""
    blocks = 5
    size = engine.token_bytes(layer) * PAGE * blocks
    room = torch.zeros(size + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 128
    cache = room[start : start + size].view(blocks, 1, PAGE, -1)
    own = CpuLayer(engine, layer, cache, Most(1, 4 * PAGE, 4 * PAGE), 0.3)
    calls = Calls(engine.plan, 1)
    table = np.arange(1, blocks, dtype=np.int32)[None]
    parts: list[Tensor] = []
    last = len(q) - 1
    for rows in (slice(0, last), slice(last, last + 1)):
        starts = np.array([0, rows.stop - rows.start], np.int32)
        step = Step(starts, np.array([rows.stop], np.int32), table)
        parts.append(own.run(q[rows], k[rows], v[rows], calls.of(step)))
    return torch.cat(parts)


# -- what is refused -------------------------------------------------------------------
def unequal(heads: int = 4) -> Dealt:
    """Whose heads are put into another order."""
    for seed in range(99):
        dealt = Dealt(engine_with(plan_with(heads, 2, seed)), 2)
        if dealt.changed:
            return dealt
    raise AssertionError("no plan needs another order")


def test_checkpoints_whose_heads_are_unknown_are_refused() -> None:
    dealt = unequal()
    tensors = checkpoint(dealt.whole.plan, fused=False)
    at = PREFIX.format(min(dealt.changed))
    packed = tensors | {f"{at}q_proj.qweight": torch.zeros(7, 9)}
    with pytest.raises(KvlatheError, match=r"qweight of shape \(7, 9\).*equal heads"):
        list(dealt.arranged(packed.items()))
    del tensors[f"{at}v_proj.weight"]
    with pytest.raises(KvlatheError, match="has no v_proj"):
        list(dealt.arranged(tensors.items()))
    scaled = checkpoint(dealt.whole.plan, fused=False)
    scaled[f"{at}q_proj.weight_scale"] = torch.ones(1)
    assert len(list(dealt.arranged(scaled.items()))) == len(scaled)
    twice = [*scaled.items(), (f"vision.{at}o_proj.bias", torch.ones(HIDDEN))]
    with pytest.raises(KvlatheError, match="is another one of layer"):
        list(dealt.arranged(twice))


def test_equal_heads_are_read_from_any_checkpoint() -> None:
    dealt = Dealt(engine_with(plan_with(4, 2, 0, alike=True)), 2)
    assert dealt.padding == 1
    packed = {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(7, 9)}
    assert list(dealt.arranged(packed.items())) == list(packed.items())


def test_plans_that_cannot_be_dealt_are_refused() -> None:
    removed = engine_with(plan_of(PAGE))
    with pytest.raises(KvlatheError, match="removes heads"):
        Dealt(removed, 2)
    whole = engine_with(plan_with(4, 2, 0))
    with pytest.raises(KvlatheError, match="has 4 KV heads"):
        Dealt(whole, 3)
    alone = dataclasses.replace(whole, plan=plan_with(1, 2, 0))
    assert len(Dealt(alone, 2).engines) == 2
