"""Laws of compositions, and of what they are made of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.bases.hadamard import hadamard
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods import composition
from kvlathe.export.methods.composition import compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.plan.codec import matrices
from kvlathe.plan.formats import aligned
from kvlathe.plan.layout import CacheLayout
from tests.support import stats_cases
from tests.support.method_cases import FORM, LOW_RANK, plan_of, seeds


@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("bits", [8, 3, 2])
def test_composition_commutes_and_keeps_what_each_decides(
    name: str, bits: int, made_up: Stats
) -> None:
    options, quantized = (
        RankOptions(removal_rate=0.2),
        f"hack:bits={bits},hadamard=none",
    )
    (one, basis), (other, _) = (
        compose(parse(request), made_up.shape, True, made_up, options, FORM)
        for request in (f"{name}+{quantized}", f"{quantized}+{name}")
    )
    assert dataclasses.replace(one, compression="") == dataclasses.replace(
        other, compression=""
    )
    ranks, exact = compose(parse(name), made_up.shape, True, made_up, options, FORM)
    formats, _ = compose(
        parse(quantized), made_up.shape, True, None, RankOptions(), FORM
    )
    assert one.lanes == ranks.lanes and one.groups == formats.groups
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
        parse(f"turboquant:bits={bits}"),
        made_up.shape,
        True,
        made_up,
        RankOptions(),
        FORM,
    )
    layout, page = CacheLayout(plan), plan.page_tokens
    for pair in matrices(layout, 1).values():
        for part in pair:
            own = part.format.meta_bytes(part.rank, page)
            assert part.format.coding == "normal" and own == aligned(2 * page)
    for at in basis.values():
        assert at.a is not None and at.o_v is not None
        np.testing.assert_allclose(at.a @ at.a.T, np.eye(len(at.a)), atol=1e-12)
        np.testing.assert_allclose(at.o_v @ at.o_v.T, np.eye(len(at.o_v)), atol=1e-12)


@pytest.mark.parametrize(
    "request_name", ["fp8", "fdc+fp8", "h2o:budget=128+fp8", "window:recent=64+fp8"]
)
def test_fp8_holds_a_byte_a_number_and_a_half_a_token(
    request_name: str, made_up: Stats
) -> None:
    """Whatever chooses ranks or tokens beside it. Tokens lie one by one, so any may go."""
    plan = plan_of(request_name, made_up)
    layout, page = CacheLayout(plan), plan.page_tokens
    cold = [b.number for b in plan.index.buckets if not b.is_hot]
    assert cold
    for part in (
        x for b in cold for pair in matrices(layout, b).values() for x in pair
    ):
        assert part.format.page_bytes(part.rank, page) == page * part.rank + aligned(
            2 * page
        )
        assert [size for _, size in part.fields] == [part.rank, 2]


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
    (fresh, cold), rng = plan.index.buckets, np.random.default_rng(0)
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
    assert cold.hot == 0 and not fresh.tier.is_coded
    assert cold.tier.arithmetic == "float"


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


def test_methods_that_fix_the_bytes_take_no_ratio(made_up: Stats) -> None:
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
            parse(f"{request_name}+hack:levels=even,hadamard={x}"),
            stats.shape,
            rope,
            stats,
            RankOptions(),
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
            sides in ("k", "kv") or plan.index.projected
        )
    if sides == "auto" and rope and not plan.index.projected:
        assert turned_plan == dataclasses.replace(
            plan, compression=turned_plan.compression
        )


def test_a_method_that_calibrates_says_so() -> None:
    with pytest.raises(KvlatheError, match="Calibrate first"):
        compose(parse("fdc"), stats_cases.SHAPE, True, None, RankOptions(), FORM)


def test_the_old_name_of_the_hadamard_rotation_still_works() -> None:
    stats = stats_cases.stats(3)
    plans = [
        compose(
            parse(f"hack:{name}=kv"), stats.shape, True, stats, RankOptions(), FORM
        )[0]
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
    options = RankOptions(compression_ratio=ratio)
    plan, _ = compose(parse(request_name), stats.shape, True, stats, options, FORM)
    note = composition.whole_ranks_note(parse(request_name), plan)
    assert bool(note) == bool(said)
    assert said in note
