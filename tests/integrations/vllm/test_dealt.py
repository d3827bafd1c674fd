"""Heads dealt to ranks as vLLM cuts them: every rank's blocks have equal bytes, its share
of the checkpoint is that of its heads, and together ranks attend what one attends."""

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
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.plan import Bucket, CompressionPlan
from kvlathe.runtime.native.library import find
from tests.support.block_cases import plan_of

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from kvlathe_vllm.calls import Calls, Step  # noqa: E402
from kvlathe_vllm.cpu import CpuLayer  # noqa: E402
from kvlathe_vllm.dealt import Dealt  # noqa: E402
from kvlathe_vllm.hosted import Hosted  # noqa: E402
from kvlathe_vllm.layer import Most  # noqa: E402
from tests.integrations.vllm.test_calls import heads_of  # noqa: E402

PAGE, DIMS, LAYERS, HIDDEN = 16, 32, 2, 24
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
    cold = (Bucket(1, eight, 0), Bucket(2, four, 0))
    buckets = (Bucket(0, every), *(bucket for bucket in cold if bucket.lanes))
    tiers = (Tier(16, 16), Tier(8, 8, group_v=16), Tier(4, 4, group_k=16, group_v=16))
    return CompressionPlan(shape, tuple(lanes), tiers, buckets, PAGE, PAGE)


def engine_with(plan: CompressionPlan, seed: int = 0) -> Hosted:
    return Hosted(Path("engine"), plan, heads_of(plan, seed))


def cut(x: Tensor, rank: int, ranks: int) -> Tensor:
    """As vLLM's column-parallel layers cut rows: the rank's part, or the one that it
    shares with others."""
    return x.chunk(ranks)[rank]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Hosted, int]:
    heads, group = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([2, 4]))
    ranks = draw(st.sampled_from([2, 4, 8]))
    ranks = min(ranks, heads * group)
    alike = draw(st.booleans())
    plan = plan_with(heads, group, draw(st.integers(0, 1 << 20)), alike)
    return engine_with(plan), ranks


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_blocks_have_equal_bytes_and_hold_every_head(case: tuple[Hosted, int]) -> None:
    whole, ranks = case
    dealt, heads = Dealt(whole, ranks), whole.plan.model.kv_heads
    for layer in range(LAYERS):
        sizes = {engine.token_bytes(layer) for engine in dealt.engines}
        own = [engine.blocks[layer].token_bytes for engine in dealt.engines]
        assert sizes == {max(own)}
        copies = max(1, ranks // heads)
        found = [x.head for one in dealt.engines for x in one.plan.active(layer)]
        assert sorted(found) == sorted(list(range(heads)) * copies)
        assert found[::copies] == list(dealt.orders[layer])
    assert dealt.padding >= 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_differ_less_than_heads_do(ranks: int) -> None:
    """Against every order that there is, the best of which no other beats."""
    for seed in range(12):
        whole = engine_with(plan_with(4, 2, seed))
        dealt = Dealt(whole, ranks)
        best = Dealt(whole, ranks)
        least = dealt.padding
        for order in itertools.permutations(range(4)):
            best.orders = [order] * LAYERS
            best.__dict__.pop("engines", None)
            least = min(least, best.padding)
        plain = Dealt(whole, ranks)
        plain.orders = [tuple(range(4))] * LAYERS
        assert dealt.padding <= plain.padding
        assert dealt.padding <= least * 1.08


def checkpoint(plan: CompressionPlan, seed: int, fused: bool) -> dict[str, Tensor]:
    """Tensors of attention and one other, in float64."""
    made = torch.Generator().manual_seed(seed)
    model = plan.model
    q, kv = model.query_heads * DIMS, model.kv_heads * DIMS

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    tensors = {"model.embed_tokens.weight": drawn(100, HIDDEN)}
    for layer in range(LAYERS):
        own = {
            name: drawn(rows, HIDDEN)
            for name, rows in zip("qkv", (q, kv, kv), strict=True)
        }
        at = PREFIX.format(layer)
        if fused:
            tensors[f"{at}qkv_proj.weight"] = torch.cat(list(own.values()))
        else:
            tensors |= {f"{at}{name}_proj.weight": x for name, x in own.items()}
            tensors[f"{at}q_proj.bias"] = drawn(q)
        tensors[f"{at}o_proj.weight"] = drawn(HIDDEN, q)
        tensors[f"{at}q_norm.weight"] = drawn(DIMS)
    return tensors


def of_heads(x: Tensor, heads: list[int]) -> Tensor:
    return x.unflatten(0, (-1, DIMS))[heads].flatten(0, 1)


@settings(max_examples=30, deadline=None)
@given(case=cases(), fused=st.booleans(), seed=st.integers(0, 99))
def test_a_rank_reads_the_weights_of_its_heads(
    case: tuple[Hosted, int], fused: bool, seed: int
) -> None:
    whole, ranks = case
    dealt, model = Dealt(whole, ranks), whole.plan.model
    kv = model.kv_heads
    tensors = checkpoint(whole.plan, seed, fused)
    read = dict(dealt.arranged(tensors.items()))
    assert read.keys() == tensors.keys()
    for layer, (rank, engine) in itertools.product(
        range(LAYERS), enumerate(dealt.engines)
    ):
        at = PREFIX.format(layer)
        heads = [lane.head for lane in engine.plan.active(layer)]
        each = model.query_heads // ranks
        copies = max(1, ranks // kv)
        first = rank % copies * each if copies > 1 else 0
        group = model.group_size
        queries = [h * group + g for h in heads for g in range(group)]
        queries = queries[first : first + each]

        if fused:
            sizes = [model.query_heads * DIMS, kv * DIMS, kv * DIMS]
            name = f"{at}qkv_proj.weight"
            read_q, read_k, read_v = read[name].split(sizes)
            q, k, v = tensors[name].split(sizes)
            tensors |= {
                f"{at}{n}_proj.weight": x for n, x in zip("qkv", (q, k, v), strict=True)
            }
        else:
            read_q, read_k, read_v = (read[f"{at}{n}_proj.weight"] for n in "qkv")
            bias = read[f"{at}q_proj.bias"]
            assert torch.equal(
                cut(bias, rank, ranks), of_heads(tensors[f"{at}q_proj.bias"], queries)
            )
        assert torch.equal(
            cut(read_q, rank, ranks), of_heads(tensors[f"{at}q_proj.weight"], queries)
        )
        for name, x in (("k_proj", read_k), ("v_proj", read_v)):
            assert torch.equal(
                cut(x, rank // copies, min(kv, ranks)),
                of_heads(tensors[f"{at}{name}.weight"], heads),
            )
        back = tensors[f"{at}o_proj.weight"].T.unflatten(0, (-1, DIMS))
        own = cut(read[f"{at}o_proj.weight"].T, rank, ranks)
        assert torch.equal(own, back[queries].flatten(0, 1))


@pytest.mark.skipif(find().native is None, reason="no native library")
@settings(max_examples=15, deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_ranks_attend_what_one_attends(case: tuple[Hosted, int], seed: int) -> None:
    """A prompt of pages and a half, then a token, in every layer."""
    whole, ranks = case
    model = whole.plan.model
    group = model.group_size
    dealt = Dealt(whole, ranks)
    random = np.random.default_rng(seed)
    for layer in range(LAYERS):
        q, k, v = (
            torch.from_numpy(random.standard_normal((2 * PAGE + 9, n, DIMS))).float()
            for n in (model.query_heads, model.kv_heads, model.kv_heads)
        )
        want = attended(whole, layer, q, k, v)
        for rank, engine in enumerate(dealt.engines):
            heads = [lane.head for lane in engine.plan.active(layer)]
            each = model.query_heads // ranks
            first = rank % max(1, ranks // model.kv_heads) * each
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
    own = CpuLayer(engine, layer, cache, Most(1, 4 * PAGE), 0.3)
    calls = Calls(engine.plan, 1)
    table = np.arange(1, blocks, dtype=np.int32)[None]
    parts: list[Tensor] = []
    last = len(q) - 1
    for rows in (slice(0, last), slice(last, last + 1)):
        starts = np.array([0, rows.stop - rows.start], np.int32)
        step = Step(starts, np.array([rows.stop], np.int32), table)
        parts.append(own.run(q[rows], k[rows], v[rows], calls.of(step), None, 0.0))
    return torch.cat(parts)


# -- what is refused -------------------------------------------------------------------
def unequal(heads: int = 4) -> Dealt:
    """Whose heads are put into another order."""
    for seed in range(99):
        dealt = Dealt(engine_with(plan_with(heads, 2, seed)), 2)
        if any(list(order) != sorted(order) for order in dealt.orders):
            return dealt
    raise AssertionError("no plan needs another order")


def test_checkpoints_whose_heads_are_unknown_are_refused() -> None:
    dealt = unequal()
    tensors = checkpoint(dealt.whole.plan, 0, fused=False)
    at = PREFIX.format(
        next(i for i, x in enumerate(dealt.orders) if list(x) != sorted(x))
    )
    packed = tensors | {f"{at}q_proj.qweight": torch.zeros(7, 9)}
    with pytest.raises(KvlatheError, match=r"qweight of shape \(7, 9\).*equal heads"):
        list(dealt.arranged(packed.items()))
    del tensors[f"{at}v_proj.weight"]
    with pytest.raises(KvlatheError, match="has no v_proj"):
        list(dealt.arranged(tensors.items()))
    scaled = checkpoint(dealt.whole.plan, 0, fused=False)
    scaled[f"{at}q_proj.weight_scale"] = torch.ones(1)
    assert len(list(dealt.arranged(scaled.items()))) == len(scaled)


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
