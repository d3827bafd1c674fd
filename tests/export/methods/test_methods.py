"""Laws of methods: their plans, and how they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.composition import compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.evidence import evidence
from kvlathe.export.methods.hack import HackOptions
from kvlathe.export.methods.lowrank import best_ratio
from kvlathe.export.methods.options import RankOptions
from kvlathe.plan.formats import WHOLE_RANK
from kvlathe.plan.layout import CacheLayout
from tests.support import stats_cases
from tests.support.method_cases import FORM, LOW_RANK, plan_of


def every_way() -> Iterator[dict[str, Any]]:
    for allocation in ("rate", "uniform", "global"):
        yield from (
            {"allocation": allocation, "basis": basis} for basis in ("svd", "balanced")
        )
        yield {"allocation": allocation, "rope_fold": "planes"}
    yield {"centre": True}


@pytest.mark.parametrize(
    ("request_name", "groups"),
    [
        ("hack:bits=8", (64, WHOLE_RANK)),
        ("hack:bits=8,keys=token,values=token", (WHOLE_RANK, WHOLE_RANK)),
        ("hack:bits=8,keys=token,values=token,group=128", (128, 128)),
        ("hack:bits=8,group=32", (32, 32)),
        ("hack:bits=8,arithmetic=int", (64, 64)),
        ("hack:bits=4,keys=token,values=token", (64, 64)),
    ],
)
def test_a_token_of_eight_bits_is_one_group_unless_asked_otherwise(
    request_name: str, groups: tuple[int, int], made_up: Stats
) -> None:
    (tier,) = (x for x in plan_of(request_name, made_up).index.tiers if x.is_coded)
    assert (tier.group_k, tier.group_v) == groups


@pytest.mark.parametrize("request_name", LOW_RANK)
@pytest.mark.parametrize("way", list(every_way()), ids=str)
def test_a_compression_ratio_is_kept_in_bytes(
    request_name: str, way: dict[str, object], made_up: Stats
) -> None:
    whole = CacheLayout(plan_of("none", made_up)).bytes_per_token()
    left = [whole]
    for ratio in (0.0, 0.2, 0.5, best_ratio(made_up.shape)):
        plan = plan_of(request_name, made_up, compression_ratio=ratio, **way)
        left.append(CacheLayout(plan).bytes_per_token())
        assert left[-1] <= (1 - ratio) * whole + 1e-9
        assert left[-1] > (1 - ratio - 0.13) * whole
    assert left == sorted(left, reverse=True)


@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("rope", [True, False])
def test_nothing_removed_is_the_uncompressed_plan(name: str, rope: bool) -> None:
    stats = stats_cases.stats(1, rope=rope)
    plan, basis = compose(
        parse(name), stats.shape, rope, stats, RankOptions(removal_rate=0.0), FORM
    )
    assert plan.lanes == plan_of("none", stats).lanes and not plan.index.projected
    assert all(
        value is None
        for lane in basis.values()
        for value in dataclasses.asdict(lane).values()
    )


@pytest.mark.parametrize("name", LOW_RANK)
def test_without_rope_nothing_is_projected_at_run_time(name: str) -> None:
    stats = stats_cases.stats(2, rope=False)
    plan, basis = compose(
        parse(name), stats.shape, False, stats, RankOptions(compression_ratio=0.4), FORM
    )
    assert not plan.index.projected and {lane.rope for lane in plan.lanes} == {"none"}
    assert all(lane.input_dim == lane.rank_k for lane in plan.lanes)
    assert any(lane.a is not None for lane in basis.values())
    with pytest.raises(KvlatheError, match="no RoPE"):
        plan_of(name, stats, rope_fold="planes")


def test_chosen_planes_are_those_of_most_energy(made_up: Stats) -> None:
    plan = plan_of("fdc", made_up, rope_fold="planes", compression_ratio=0.5)
    assert (
        any(lane.rope == "planes" for lane in plan.lanes) and not plan.index.projected
    )
    moments = made_up.whole
    for lane in plan.lanes:
        at, half = (lane.layer, lane.head), made_up.shape.head_dim // 2
        q, k = moments.qq[at], moments.second("k", True)[at]
        pairs = [np.ix_([i, i + half], [i, i + half]) for i in range(half)]
        energy = [np.trace(q[pair] @ k[pair]) for pair in pairs]
        chosen = lane.planes or range(half)
        left_out = set(range(half)) - set(chosen)
        assert min(energy[i] for i in chosen) >= max(
            (energy[i] for i in left_out), default=0
        )
        assert len(chosen) % 8 == 0 and lane.rank_k == 2 * len(chosen)


@pytest.mark.parametrize("way", list(every_way()), ids=str)
def test_a_removal_rate_means_the_same_bytes_in_every_way(
    way: dict[str, object], made_up: Stats
) -> None:
    papers = plan_of("fdc", made_up, removal_rate=0.1)
    other = plan_of("fdc", made_up, removal_rate=0.1, **way)
    assert (
        papers.index.kept_dims - 0.13
        < other.index.kept_dims
        <= papers.index.kept_dims + (0.05 if way.get("centre") else 1e-9)
    )


def test_uniform_ranks_are_one_for_all_lanes(made_up: Stats) -> None:
    plan = plan_of("fdc", made_up, allocation="uniform", compression_ratio=0.4)
    assert len({(lane.rank_k, lane.rank_v) for lane in plan.lanes}) == 1


def test_the_methods_differ_where_their_papers_do(made_up: Stats) -> None:
    (_, one), (_, other) = (
        compose(
            parse(name),
            made_up.shape,
            True,
            made_up,
            RankOptions(compression_ratio=0.5, allocation="uniform"),
            FORM,
        )
        for name in ("fdc", "zack")
    )
    _, _, vectors = np.linalg.svd(made_up.wv_gram[0, 0])
    ours, theirs = one[0, 0], other[0, 0]
    assert ours.a_v is not None and theirs.a_v is not None
    assert ours.b is not None and theirs.b is not None
    np.testing.assert_allclose(np.abs(np.sum(ours.a_v * vectors[:32].T, 0)), 1)
    assert np.array_equal(ours.b, theirs.b)
    assert not np.allclose(ours.a_v, theirs.a_v)
    assert (
        parse("none").calibration,
        parse("fdc").calibration,
        parse("zack+none").calibration,
    ) == (
        None,
        "random",
        "text",
    )


def test_evidence_of_equal_halves_is_perfect(made_up: Stats) -> None:
    same = dataclasses.replace(made_up, halves=(made_up.halves[0], made_up.halves[0]))
    plan = plan_of("zack", same, compression_ratio=0.3)
    found = evidence(parse("zack"), same, RankOptions(), plan)
    assert found is not None and found.spectrum_k.shape == (3, 4, 64)
    assert (
        max(
            found.delta_k.max(),
            found.delta_v.max(),
            found.angle_k.max(),
            found.angle_v.max(),
        )
        < 1e-6
    )
    assert evidence(parse("none"), same, RankOptions(), plan) is None


def test_requests_are_read_and_their_options_win(made_up: Stats) -> None:
    first, second = parse("HACK:bits=4,group=32 + fdc").methods
    assert (first.name, first.written, second.name) == (
        "hack",
        ("bits", "group"),
        "fdc",
    )
    assert first.options == HackOptions(bits=4, group=32)
    written = plan_of(
        "fdc:removal_rate=0.3,basis=balanced", made_up, compression_ratio=0.1
    )
    assert (
        written.lanes
        == plan_of("fdc", made_up, removal_rate=0.3, basis="balanced").lanes
    )


@pytest.mark.parametrize(
    ("request_name", "message"),
    [
        ("fcd", "Did you mean fdc"),
        ("gone", "Choose one of auto, duo, fdc"),
        ("kivi:group=128", "pages of 64 tokens"),
        ("kivi+hack", "kivi and hack cannot be composed.*number format"),
        ("fdc:rank=3", "'rank' of fdc is unknown"),
        ("fdc:basis=ballanced", "Did you mean balanced"),
        ("fdc:removal_rate=much", "a fraction, from 0 up to 1"),
        ("fdc:removal_rate=1.5", "a fraction"),
        ("fdc:removal_rate", "cannot be read"),
        ("fdc+zack", "fdc and zack cannot be composed.*chooses the ranks"),
        ("hack+zack+hack:bits=8", "hack and hack cannot be composed.*number format"),
        ("hack:bits=5", "Choose one of 2, 3, 4, 8"),
        ("hack:bits=8,levels=normal", "4, 3 and 2 bits"),
        ("hack:levels=normal,rounding=stochastic", "codes are the nearest"),
        ("hack:bit=4", "Did you mean bits"),
        ("fp8:bits=8", "'bits' of fp8 is unknown"),
        ("fp8+hack", "fp8 and hack cannot be composed.*number format"),
        ("hack:group=128", "pages of 64 tokens"),
        ("hack:sums=stored,arithmetic=float", "contradicts"),
        ("hack:bits_k=16,bits_v=16", "contradicts"),
        (
            "fdc+hack:bits=8,compression_ratio=0.5",
            "'compression_ratio' of hack is unknown",
        ),
        ("fdc:compression_ratio=0.99+hack:bits=8", "at most 0.9"),
        ("none:rate=1", "'rate' of none is unknown: it has none"),
        ("fdc:removal_rate=0.1,compression_ratio=0.1", "exclude each other"),
        ("fdc:compression_ratio=0.9", "at most 0.75"),
    ],
)
def test_unusable_requests_say_what_would_do(
    request_name: str, message: str, made_up: Stats
) -> None:
    with pytest.raises(KvlatheError, match=message):
        plan_of(request_name, made_up)
