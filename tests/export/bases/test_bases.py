"""Laws of bases and of ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.export.bases import allocate
from kvlathe.export.bases.rotation import (
    add_ridge,
    balanced_basis,
    element_change,
    energy_missed,
    principal_angle,
    removed_energy,
    shared_basis,
)
from kvlathe.plan.heads import RANK_MULTIPLE
from tests.support.method_cases import psd, seeds


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
        balanced_basis(seen, reader),
        shared_basis(seen, reader),
        add_ridge(seen),
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
    for side in (balanced_basis(covariance, reader), shared_basis(covariance, reader)):
        np.testing.assert_allclose(side.into @ side.back.T, np.eye(d), atol=1e-7)
        assert (np.diff(side.spectrum) <= 1e-12 * max(side.spectrum[0], 1)).all() and (
            side.spectrum >= 0
        ).all()


def test_balanced_axes_carry_the_same_in_queries_and_keys() -> None:
    rng = np.random.default_rng(0)
    seen, reader = psd(rng, 32, 64, 2.0), psd(rng, 32, 64, 4.0)
    side, covariance = balanced_basis(seen, reader), add_ridge(seen)
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
    side = shared_basis(queries.T @ queries, keys.T @ keys)
    np.testing.assert_allclose(side.spectrum, values)
    np.testing.assert_allclose(np.abs(np.sum(side.into * vectors.T, 0)), 1)


def test_the_principal_angle_of_a_turned_space_is_its_angle() -> None:
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


def test_energy_missed_is_nothing_within_a_degenerate_space_and_all_across_it() -> None:
    rng = np.random.default_rng(0)
    flat = np.diag([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    one, other = np.eye(8)[:, :2], np.vstack([turn, np.zeros((4, 4))])[:, :2]
    assert energy_missed(one, other, flat) == pytest.approx(0, abs=1e-12)
    assert energy_missed(np.eye(8)[:, 4:6], other, flat) == pytest.approx(1)


spectra = st.tuples(seeds, st.sampled_from([16, 24, 64, 80, 128])).map(
    lambda x: (
        -np.sort(-(np.random.default_rng(x[0]).exponential(size=(6, x[1])) ** 3), -1)
    )
)


@given(spectra, st.floats(0, 0.99))
def test_the_rate_rule_is_the_papers(spectrum: np.ndarray, rate: float) -> None:
    d = spectrum.shape[-1]
    dims = np.full(len(spectrum), d)
    ranks = allocate.by_rate(spectrum, dims, rate)
    for row, rank in zip(spectrum, ranks, strict=True):
        fits = [j for j in range(d + 1) if row[j:].sum() <= (rate + 1e-9) * row.sum()]
        fewest = max(min(fits), 1) if rate > 0 else d
        assert rank == -(-fewest // RANK_MULTIPLE) * RANK_MULTIPLE


@given(spectra, st.integers(12, 100), st.booleans())
def test_ranks_stay_in_the_budget_and_grow_with_it(
    spectrum: np.ndarray, steps: int, uneven: bool
) -> None:
    """Of rows that are alike, and of K and V lanes of which some have half the dims."""
    d = spectrum.shape[-1]
    dims = np.array([d, d // 2 if uneven else d, d] * 2)
    spectrum = np.where(np.arange(d) < dims[:, None], spectrum, 0.0)
    most = np.array([allocate.whole(own) for own in dims.tolist()])
    budgets = [
        min(n * RANK_MULTIPLE, most.sum()) for n in (max(steps, 6), steps + 6, 1000)
    ]
    rules: list[Callable[[int], np.ndarray]] = [
        lambda budget: allocate.by_rate(
            spectrum, dims, allocate.rate_within(spectrum, dims, budget)
        ),
        lambda budget: allocate.by_loss(spectrum, dims, budget),
        lambda budget: allocate.uniform(dims, budget),
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
    ranks = allocate.by_loss(loss, np.full(4, 64), steps * RANK_MULTIPLE)
    every = np.stack(
        np.meshgrid(*[np.arange(16, 65, 16)] * 4, indexing="ij"), -1
    ).reshape(-1, 4)
    kept = np.concatenate([np.zeros((4, 1)), np.cumsum(loss, -1)], -1)
    value = kept[np.arange(4), every].sum(-1)
    allowed = every.sum(-1) <= steps * RANK_MULTIPLE
    assert ranks.sum() == steps * RANK_MULTIPLE
    assert kept[np.arange(4), ranks].sum() == pytest.approx(value[allowed].max())
