"""Laws of bases, ranks, methods and of the accuracy search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases import allocate
from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.bases.rotation import (
    balanced,
    element_change,
    energy_missed,
    principal_angle,
    removed_energy,
    ridged,
    shared,
)
from kvlathe.export.calibration.calibrate import calibrate_on, random_sequences
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.methods import composition
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.evidence import evidence
from kvlathe.export.methods.hadamard import hadamard
from kvlathe.export.methods.lowrank import best_ratio
from kvlathe.export.methods.options import Options, parse
from kvlathe.export.methods.registry import METHODS, calibration
from kvlathe.export.methods.variants import removed, variants
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search import search
from kvlathe.plan.codec import matrices
from kvlathe.plan.formats import aligned
from kvlathe.plan.heads import RANK_MULTIPLE
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.tasks import tasks
from tests.support import stats_cases

LATHE = Path(__file__).resolve().parents[3] / "models" / "lathe-5m"
LOW_RANK = tuple(
    name for name, method in METHODS.items() if method.rotate and not method.measured
)
FORM = CacheSettings(32)
seeds = st.integers(0, 2**32 - 1)


def psd(rng: np.random.Generator, d: int, rank: int, sharp: float) -> np.ndarray:
    x = rng.normal(size=(rank, d)) * np.exp(-sharp * np.arange(d) / d)
    return x.T @ x / max(rank, 1)


def plan_of(request: str, stats: Stats, **asked: Any) -> CompressionPlan:  # noqa: ANN401  (Options' fields)
    return compose(request, stats.shape, stats.rope, stats, Options(**asked), FORM)[0]


@pytest.fixture(scope="module")
def made_up() -> Stats:
    return stats_cases.stats(0)


# -- bases -----------------------------------------------------------------------------
def error(keep: np.ndarray, covariance: np.ndarray, reader: np.ndarray) -> float:
    """Mean of ((x - x keep) y^T)^2 for independent x and y."""
    lost = np.eye(len(keep)) - keep
    return float(np.trace(lost.T @ covariance @ lost @ reader))


@settings(max_examples=40)
@given(seeds, st.sampled_from([16, 24, 48]), st.floats(0, 8), st.floats(0, 8))
def test_balanced_loses_least_of_any_pair_at_every_rank(
    seed: int, d: int, sharp_x: float, sharp_y: float
) -> None:
    rng = np.random.default_rng(seed)
    seen, reader = psd(rng, d, 2 * d, sharp_x), psd(rng, d, 2 * d, sharp_y)
    best, rotated, covariance = (
        balanced(seen, reader),
        shared(seen, reader),
        ridged(seen),
    )
    any_pair = rng.normal(size=(d, d))
    others = [
        (rotated.into, rotated.back),
        (any_pair, np.linalg.inv(any_pair).T),
        (best.into, best.back),
    ]
    for rank in range(1, d, 5):
        ours = error(best.into[:, :rank] @ best.back[:, :rank].T, covariance, reader)
        left = (best.spectrum[rank:] ** 2).sum()
        assert ours == pytest.approx(
            left, rel=1e-6, abs=1e-9 * np.trace(covariance @ reader)
        )
        for into, back in others:
            theirs = error(into[:, :rank] @ back[:, :rank].T, covariance, reader)
            assert ours <= theirs * (1 + 1e-6) + 1e-9 * np.trace(covariance @ reader)


@settings(max_examples=40)
@given(seeds, st.sampled_from([16, 24, 128]), st.floats(0, 1))
def test_bases_are_exact_at_full_rank_whatever_calibration_saw(
    seed: int, d: int, seen: float
) -> None:
    rng = np.random.default_rng(seed)
    covariance, reader = (
        psd(rng, d, round(share * d), 3.0) for share in (seen, rng.random())
    )
    for side in (balanced(covariance, reader), shared(covariance, reader)):
        np.testing.assert_allclose(side.into @ side.back.T, np.eye(d), atol=1e-7)
        assert (np.diff(side.spectrum) <= 1e-12 * max(side.spectrum[0], 1)).all() and (
            side.spectrum >= 0
        ).all()


def test_balanced_axes_carry_the_same_in_queries_and_keys() -> None:
    rng = np.random.default_rng(0)
    seen, reader = psd(rng, 32, 64, 2.0), psd(rng, 32, 64, 4.0)
    side, covariance = balanced(seen, reader), ridged(seen)
    x, y = (side.into.T @ covariance @ side.into, side.back.T @ reader @ side.back)
    np.testing.assert_allclose(x, np.diag(side.spectrum), atol=1e-8)
    np.testing.assert_allclose(y, np.diag(side.spectrum), atol=1e-8)
    np.testing.assert_allclose(
        removed_energy(side, covariance, reader), side.spectrum**2, rtol=1e-6
    )


def test_shared_is_the_svd_of_the_stack() -> None:
    rng = np.random.default_rng(1)
    queries, keys = (
        rng.normal(size=(200, 16)),
        rng.normal(size=(100, 16)) * np.arange(1, 17),
    )
    _, values, vectors = np.linalg.svd(
        np.concatenate([queries, keys]), full_matrices=False
    )
    side = shared(queries.T @ queries, keys.T @ keys)
    np.testing.assert_allclose(side.spectrum, values)
    np.testing.assert_allclose(np.abs(np.sum(side.into * vectors.T, 0)), 1)


def test_the_same_space_has_no_angle_and_a_turned_one_has_its_own() -> None:
    basis = np.linalg.qr(np.random.default_rng(2).normal(size=(32, 32)))[0]
    mixed = basis[:, :8] @ np.linalg.qr(np.random.default_rng(3).normal(size=(8, 8)))[0]
    assert principal_angle(basis[:, :8], mixed) < 1e-7
    turned = np.concatenate(
        [basis[:, :7], np.cos(0.3) * basis[:, 7:8] + np.sin(0.3) * basis[:, 8:9]], 1
    )
    assert principal_angle(basis[:, :8], turned) == pytest.approx(0.3)
    signs = np.where(np.arange(32) % 3, 1, -1)
    epsilon, delta = element_change(basis, (basis * signs)[:, ::-1])
    assert delta < 1e-12 < epsilon == pytest.approx(np.abs(basis).mean())


# -- ranks -----------------------------------------------------------------------------
spectra = st.tuples(seeds, st.sampled_from([16, 24, 64, 80, 128])).map(
    lambda x: (
        -np.sort(-(np.random.default_rng(x[0]).exponential(size=(6, x[1])) ** 3), -1)
    )
)


@given(spectra, st.floats(0, 0.99))
def test_the_rate_rule_is_the_papers(spectrum: np.ndarray, rate: float) -> None:
    d = spectrum.shape[-1]
    for row, rank in zip(spectrum, allocate.by_rate(spectrum, rate), strict=True):
        fits = [j for j in range(d + 1) if row[j:].sum() <= (rate + 1e-9) * row.sum()]
        fewest = max(min(fits), 1) if rate > 0 else d
        assert rank == -(-fewest // RANK_MULTIPLE) * RANK_MULTIPLE


@given(spectra, st.integers(12, 100))
def test_ranks_stay_in_the_budget_and_grow_with_it(
    spectrum: np.ndarray, steps: int
) -> None:
    d = spectrum.shape[-1]
    most = allocate.whole(d)
    budgets = [
        min(n * RANK_MULTIPLE, 6 * most) for n in (max(steps, 6), steps + 6, 1000)
    ]
    rules: list[Callable[[int], np.ndarray]] = [
        lambda budget: allocate.by_rate(
            spectrum, allocate.rate_within(spectrum, budget)
        ),
        lambda budget: allocate.by_loss(spectrum, budget),
        lambda budget: allocate.uniform(6, d, budget),
    ]
    for rule in rules:
        small, large, full = (rule(budget) for budget in budgets)
        assert (small <= large).all() and (large <= full).all() and (full == most).all()
        for ranks, budget in zip((small, large), budgets, strict=False):
            assert (ranks % RANK_MULTIPLE == 0).all() and (ranks >= RANK_MULTIPLE).all()
            assert ranks.sum() <= max(budget, 6 * RANK_MULTIPLE)


@settings(max_examples=30)
@given(seeds, st.integers(4, 16))
def test_the_global_allocation_is_the_best_of_all(seed: int, steps: int) -> None:
    loss = -np.sort(-(np.random.default_rng(seed).exponential(size=(4, 64)) ** 4), -1)
    ranks = allocate.by_loss(loss, steps * RANK_MULTIPLE)
    every = np.stack(
        np.meshgrid(*[np.arange(16, 65, 16)] * 4, indexing="ij"), -1
    ).reshape(-1, 4)
    kept = np.concatenate([np.zeros((4, 1)), np.cumsum(loss, -1)], -1)
    value = kept[np.arange(4), every].sum(-1)
    allowed = every.sum(-1) <= steps * RANK_MULTIPLE
    assert ranks.sum() == steps * RANK_MULTIPLE
    assert kept[np.arange(4), ranks].sum() == pytest.approx(value[allowed].max())


# -- plans -----------------------------------------------------------------------------
def every_way() -> Iterator[dict[str, Any]]:
    for allocation in ("rate", "uniform", "global"):
        yield from (
            {"allocation": allocation, "basis": basis} for basis in ("svd", "balanced")
        )
        yield {"allocation": allocation, "rope_fold": "planes"}
    yield {"centre": True}


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
        name, stats.shape, rope, stats, Options(removal_rate=0.0), FORM
    )
    assert plan.lanes == plan_of("none", stats).lanes and not plan.projected
    assert all(
        value is None
        for lane in basis.values()
        for value in dataclasses.asdict(lane).values()
    )


@pytest.mark.parametrize("name", LOW_RANK)
def test_without_rope_nothing_is_projected_at_run_time(name: str) -> None:
    stats = stats_cases.stats(2, rope=False)
    plan, basis = compose(
        name, stats.shape, False, stats, Options(compression_ratio=0.4), FORM
    )
    assert not plan.projected and {lane.rope for lane in plan.lanes} == {"none"}
    assert all(lane.input_dim == lane.rank_k for lane in plan.lanes)
    assert any(lane.a is not None for lane in basis.values())
    with pytest.raises(KvlatheError, match="no RoPE"):
        plan_of(name, stats, rope_fold="planes")


def test_chosen_planes_are_those_of_most_energy(made_up: Stats) -> None:
    plan = plan_of("fdc", made_up, rope_fold="planes", compression_ratio=0.5)
    assert any(lane.rope == "planes" for lane in plan.lanes) and not plan.projected
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
        papers.kept_dims - 0.13
        < other.kept_dims
        <= papers.kept_dims + (0.05 if way.get("centre") else 1e-9)
    )


def test_uniform_ranks_are_one_for_all_lanes(made_up: Stats) -> None:
    plan = plan_of("fdc", made_up, allocation="uniform", compression_ratio=0.4)
    assert len({(lane.rank_k, lane.rank_v) for lane in plan.lanes}) == 1


def test_the_methods_differ_where_their_papers_do(made_up: Stats) -> None:
    (_, one), (_, other) = (
        compose(
            name,
            made_up.shape,
            True,
            made_up,
            Options(compression_ratio=0.5, allocation="uniform"),
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
    assert (calibration("none"), calibration("fdc"), calibration("zack+none")) == (
        None,
        "random",
        "text",
    )


def test_evidence_of_equal_halves_is_perfect(made_up: Stats) -> None:
    same = dataclasses.replace(made_up, halves=(made_up.halves[0], made_up.halves[0]))
    plan = plan_of("zack", same, compression_ratio=0.3)
    found = evidence("zack", same, Options(), plan)
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
    assert evidence("none", same, Options(), plan) is None


# -- requests --------------------------------------------------------------------------
def test_requests_are_read_and_their_options_win(made_up: Stats) -> None:
    first, second = parse("Name:key=1,other=two + next")
    assert (first.name, first.options, second.name) == (
        "name",
        {"key": "1", "other": "two"},
        "next",
    )
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
        ("gone", "Choose one of none, fdc, zack, hack"),
        ("kivi:group=128", "pages of 64 tokens"),
        ("kivi+hack", "kivi and hack cannot be composed.*number format"),
        ("fdc:rank=3", "'rank' is unknown"),
        ("fdc:basis=ballanced", "Did you mean balanced"),
        ("fdc:removal_rate=much", "not a number"),
        ("fdc:removal_rate=1.5", "a fraction"),
        ("fdc:removal_rate", "cannot be read"),
        ("fdc+zack", "fdc and zack cannot be composed.*chooses the ranks"),
        ("hack+zack+hack:bits=8", "hack and hack cannot be composed.*number format"),
        ("hack:bits=5", "Choose one of 2, 3, 4, 8"),
        ("hack:bits=8,levels=normal", "4, 3 and 2 bits"),
        ("hack:levels=normal,rounding=stochastic", "codes are the nearest"),
        ("hack:bit=4", "Did you mean bits"),
        ("hack:group=128", "pages of 64 tokens"),
        ("hack:sums=stored,arithmetic=float", "contradicts"),
        ("hack:bits_k=16,bits_v=16", "contradicts"),
        ("fdc+hack:bits=8,compression_ratio=0.5", "'compression_ratio' is unknown"),
        ("fdc:compression_ratio=0.99+hack:bits=8", "at most 0.9"),
        ("none:rate=1", "'rate' is unknown"),
        ("fdc:removal_rate=0.1,compression_ratio=0.1", "exclude each other"),
        ("fdc:compression_ratio=0.9", "at most 0.75"),
    ],
)
def test_unusable_requests_say_what_would_do(
    request_name: str, message: str, made_up: Stats
) -> None:
    with pytest.raises(KvlatheError, match=message):
        plan_of(request_name, made_up)


# -- compositions ----------------------------------------------------------------------
@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("bits", [8, 3, 2])
def test_composition_commutes_and_keeps_what_each_decides(
    name: str, bits: int, made_up: Stats
) -> None:
    options, quantized = Options(removal_rate=0.2), f"hack:bits={bits},hadamard=none"
    (one, basis), (other, _) = (
        compose(request, made_up.shape, True, made_up, options, FORM)
        for request in (f"{name}+{quantized}", f"{quantized}+{name}")
    )
    assert dataclasses.replace(one, compression="") == dataclasses.replace(
        other, compression=""
    )
    ranks, exact = compose(name, made_up.shape, True, made_up, options, FORM)
    formats, _ = compose(quantized, made_up.shape, True, None, Options(), FORM)
    assert (
        one.lanes == ranks.lanes
        and one.tiers == formats.tiers
        and one.buckets == formats.buckets
    )
    assert all(
        y.a_v is not None and np.array_equal(x.a_v, y.a_v)
        for x, y in zip(basis.values(), exact.values(), strict=True)
        if x.a_v is not None
    )


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_turboquant_rotates_and_has_one_scale_a_token(
    bits: int, made_up: Stats
) -> None:
    plan, basis = compose(
        f"turboquant:bits={bits}", made_up.shape, True, made_up, Options(), FORM
    )
    layout, page = CacheLayout(plan), plan.page_tokens
    for pair in matrices(layout, 1).values():
        for part in pair:
            own = part.format.meta_bytes(part.rank, page)
            assert part.format.has_fixed_levels and own == aligned(2 * page)
    for at in basis.values():
        assert at.a is not None and at.o_v is not None
        np.testing.assert_allclose(at.a @ at.a.T, np.eye(len(at.a)), atol=1e-12)
        np.testing.assert_allclose(at.o_v @ at.o_v.T, np.eye(len(at.o_v)), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "group_k", "group_v"),
    [("kivi", 32, 32), ("kivi:group=64", 64, 64), ("kvquant", 64, 128)],
)
def test_comparison_plans_group_keys_by_channel_and_values_by_token(
    name: str, group_k: int, group_v: int, made_up: Stats
) -> None:
    """A channel of K scaled up and a token of V scaled up leave the relative error of
    all others where it was."""
    plan = plan_of(name, made_up)
    (fresh, cold), rng = plan.buckets, np.random.default_rng(0)
    (k, v) = next(iter(matrices(CacheLayout(plan), 1).values()))
    page = np.zeros(CacheLayout(plan).page_stride[1], np.uint8)
    values = rng.normal(size=(plan.page_tokens, k.rank)).astype(np.float32)
    loud_channel, loud_token = values.copy(), values.copy()
    loud_channel[:, 3] *= 1000
    loud_token[3] *= 1000
    for part, loud, axis in ((k, loud_channel, 1), (v, loud_token, 0)):
        part.write(page, values)
        plain = part.read(page)
        part.write(page, loud)
        np.testing.assert_array_equal(
            np.delete(part.read(page), 3, axis), np.delete(plain, 3, axis)
        )
    assert len(k.groups) == plan.page_tokens // group_k and len(v.groups) == -(
        -v.rank // group_v
    )
    assert (
        cold.source == 0
        and not plan.tiers[fresh.tier].is_coded
        and plan.tiers[cold.tier].arithmetic == "float"
    )


@pytest.mark.parametrize("ratio", [0.75, 0.8, 0.9])
def test_a_ratio_asked_of_a_composition_counts_all_its_bytes(
    ratio: float, made_up: Stats
) -> None:
    whole = CacheLayout(plan_of("none", made_up)).bytes_per_token()
    plan = plan_of("fdc+hack:bits=8", made_up, compression_ratio=ratio)
    assert (
        (1 - ratio - 0.03) * whole
        < CacheLayout(plan).bytes_per_token()
        <= (1 - ratio) * whole
    )


def test_what_fixes_the_bytes_takes_no_ratio(made_up: Stats) -> None:
    with pytest.raises(KvlatheError, match="none of its methods chooses the ranks"):
        plan_of("hack:bits=8", made_up, compression_ratio=0.5)


@settings(max_examples=30)
@given(seeds, st.sampled_from([16, 20, 48, 64, 80, 128]))
def test_turns_are_orthogonal_and_spread_every_axis(seed: int, rank: int) -> None:
    s = hadamard(rank, np.random.default_rng(seed))
    np.testing.assert_allclose(s @ s.T, np.eye(rank), atol=1e-12)
    assert np.abs(s).max() < (0.99 if rank & (rank - 1) else rank**-0.5 + 1e-9)


@pytest.mark.parametrize(
    "request_name",
    ["fdc:removal_rate=0.3", "fdc:rope_fold=planes,removal_rate=0.3", "none", "zack"],
)
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("sides", ["k", "v", "kv", "auto"])
def test_a_hadamard_rotation_changes_no_product(
    request_name: str, rope: bool, sides: str
) -> None:
    if "planes" in request_name and not rope:
        return
    stats = stats_cases.stats(3, rope=rope)
    (plan, plain), (turned_plan, turned) = (
        compose(
            f"{request_name}+hack:hadamard={x}",
            stats.shape,
            rope,
            stats,
            Options(),
            FORM,
        )
        for x in ("none", sides)
    )
    one = np.eye(stats.shape.head_dim)

    def products(
        basis: Basis, at: tuple[int, int], width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        lane = basis.get(at, LaneBasis())
        qk = np.eye(width) if lane.a is None or lane.b is None else lane.a @ lane.b.T
        return qk, one if lane.a_v is None or lane.o_v is None else lane.a_v @ lane.o_v

    for lane, other in zip(plan.lanes, turned_plan.lanes, strict=True):
        at = (lane.layer, lane.head)
        width = (
            lane.input_dim
            if lane.projected or lane.rope != "none"
            else stats.shape.head_dim
        )
        for x, y in zip(
            products(plain, at, width), products(turned, at, width), strict=True
        ):
            np.testing.assert_allclose(x, y, atol=1e-9)
        assert (lane.rank_k, lane.rank_v) == (other.rank_k, other.rank_v)
        assert lane.projected == other.projected or (
            sides in ("k", "kv") or plan.projected
        )
    if sides == "auto" and rope and not plan.projected:
        assert turned_plan == dataclasses.replace(
            plan, compression=turned_plan.compression
        )


def test_a_method_that_calibrates_says_so() -> None:
    with pytest.raises(KvlatheError, match="Calibrate first"):
        compose("fdc", stats_cases.SHAPE, True, None, Options(), FORM)


def test_the_old_name_of_the_hadamard_rotation_still_works() -> None:
    stats = stats_cases.stats(3)
    plans = [
        compose(f"hack:{name}=kv", stats.shape, True, stats, Options(), FORM)[0]
        for name in ("hadamard", "spin")
    ]
    assert plans[0] == dataclasses.replace(plans[1], compression=plans[0].compression)


@pytest.mark.parametrize(
    ("request_name", "head_dim", "ratio", "said"),
    [
        ("fdc", 16, None, "dimensions. Choose a method that quantizes."),
        ("fdc+zipcache", 16, None, "dimensions. Leave the part"),
        ("fdc+zipcache", 64, 0.6, "number formats alone"),
        ("fdc:removal_rate=0", 64, None, "less than a step of 16"),
        ("fdc", 64, None, ""),
        ("zipcache", 64, None, ""),
    ],
)
def test_ranks_that_stay_whole_are_said(
    request_name: str,
    head_dim: int,
    ratio: float | None,
    said: str,
) -> None:
    stats = stats_cases.stats(
        3, dataclasses.replace(stats_cases.SHAPE, head_dim=head_dim)
    )
    options = Options(compression_ratio=ratio)
    plan, _ = compose(request_name, stats.shape, True, stats, options, FORM)
    note = composition.whole_ranks_note(plan)
    assert bool(note) == bool(said)
    assert said in note


# -- the search ------------------------------------------------------------------------
@given(st.floats(0, 1), st.floats(0.1, 0.9))
def test_bisection_finds_the_edge(edge: float, most: float) -> None:
    found = search.largest(lambda ratio: float(ratio <= edge), 1.0, 0.0, most, 0.01)
    assert found is not None and found <= edge and found >= min(edge, most) - 0.01
    floor = search.largest(
        lambda ratio: float(ratio <= edge), 1.0, most / 2, most, 0.01
    )
    assert (floor is None) == (edge < most / 2)


@pytest.fixture(scope="module")
def lathe() -> tuple[Checkpoint, Stats]:
    checkpoint = Checkpoint(LATHE)
    return checkpoint, calibrate_on(
        checkpoint, random_sequences(checkpoint.spec.vocab_size, 2048, 0, 512), 0, {}
    )


def searched(
    lathe: tuple[Checkpoint, Stats],
    request: str,
    accuracy: float,
    exam: search.Exam,
    kept: Path | None = None,
) -> tuple[CompressionPlan, Basis]:
    checkpoint, stats = lathe
    options = Options(basis="balanced")
    found = variants(request, stats.shape, stats.rope, stats, options, FORM)
    return search.search(
        checkpoint, found, accuracy, exam, (stats.digest, options, FORM), kept
    )


def exam_of(metric: search.Metric) -> search.Exam:
    rng = np.random.default_rng(0)
    windows = tuple(tuple(rng.integers(2, 8192, 40).tolist()) for _ in range(2))
    questions = tuple(tasks.Question(window[:30], (window[5],)) for window in windows)
    return search.Exam(
        metric,
        questions if metric == "retrieval" else (),
        () if metric == "retrieval" else windows,
    )


@pytest.mark.parametrize("metric", ["perplexity", "agreement"])
def test_a_search_keeps_its_promise_and_is_a_lookup_afterwards(
    metric: search.Metric,
    lathe: tuple[Checkpoint, Stats],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exam = exam_of(metric)
    plan, basis = searched(lathe, "fdc", 0.5, exam, tmp_path)
    curve = plan.notes["curve"]
    whole = search.TorchOracle(
        decoder_from(
            lathe[0], *compose("none", plan.model, True, None, Options(), FORM)
        )
    )
    said = [search.says(whole, window) for window in exam.windows]
    reached = search.score(
        exam, search.TorchOracle(decoder_from(lathe[0], plan, basis)), said
    )
    assert curve["baseline"] == pytest.approx(search.score(exam, whole, said), rel=1e-4)
    assert reached >= curve["target"] == 0.5 * curve["baseline"]
    removed = 1 - plan.kept_dims
    assert (
        max(
            point["removed"]
            for point in curve["points"]
            if point["score"] >= curve["target"]
        )
        == removed
        > 0
    )
    monkeypatch.setattr(search, "decoder_from", None)
    again, _ = searched(lathe, "fdc", 0.5, exam, tmp_path)
    assert again == plan


def test_a_search_chooses_bits_that_a_request_leaves_open(
    lathe: tuple[Checkpoint, Stats],
) -> None:
    """Random tokens, so nothing is predicted well: 8 bit keeps all of it, and the
    fewest bits that do win."""
    checkpoint, stats = lathe
    form = dataclasses.replace(FORM, page_tokens=32, prefill_chunk=32)
    found = variants(
        "hack:group=32,arithmetic=float", stats.shape, True, None, Options(), form
    )
    names = [family.name for family in found]
    assert names == [
        f"hack:group=32,arithmetic=float,bits={bits}" for bits in (2, 3, 4, 8)
    ]
    assert all(family.least == family.most for family in found)
    plan, _ = search.search(checkpoint, found, 0.8, exam_of("perplexity"), ())
    assert {point["of"] for point in plan.notes["curve"]["points"]} == {
        "hack:group=32,arithmetic=float"
    }
    scores = {point["plan"]: point["score"] for point in plan.notes["curve"]["points"]}
    enough = [
        name for name in names if scores.get(name, 0.0) >= plan.notes["curve"]["target"]
    ]
    assert plan.compression == enough[0] and plan.tiers[1].bits_k == int(enough[0][-1])


def test_accuracy_out_of_reach_names_the_best_there_is(
    lathe: tuple[Checkpoint, Stats],
) -> None:
    with pytest.raises(KvlatheError, match=r"already leaves .* or less"):
        searched(lathe, "fdc", 10.0, exam_of("perplexity"))
    with pytest.raises(KvlatheError, match="scores 0 on retrieval"):
        searched(lathe, "fdc", 0.9, exam_of("retrieval"))


@pytest.mark.parametrize(
    "request_name", ["fdc", "fdc+hack:bits=4", "hack", "zack+hack"]
)
def test_a_family_reaches_what_it_says(request_name: str, made_up: Stats) -> None:
    for family in variants(request_name, made_up.shape, True, made_up, Options(), FORM):
        for ratio in {family.least, (family.least + family.most) / 2, family.most}:
            assert removed(family.plan(ratio)[0], FORM.bits) >= ratio - 1e-9


def test_energy_missed_is_nothing_within_a_degenerate_space_and_all_across_it() -> None:
    rng = np.random.default_rng(0)
    flat = np.diag([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    one, other = np.eye(8)[:, :2], np.vstack([turn, np.zeros((4, 4))])[:, :2]
    assert energy_missed(one, other, flat) == pytest.approx(0, abs=1e-12)
    assert energy_missed(np.eye(8)[:, 4:6], other, flat) == pytest.approx(1)
