"""The law of a formula by torch: the numbers that numpy computes from the same pages, of
keys and values in every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlathe.plan.codec import matrices
from kvlathe.plan.formats import Tier
from kvlathe.plan.formula import INPUTS, inputs_of
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.token_score import KeyFormula
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.host.saliency import by_formula, ranked
from kvlathe.runtime.sessions.torch_cuda.tokens.keys import FormulaScores
from kvlathe.runtime.sessions.torch_cuda.tokens.saliency import ranked as ranked_there
from tests.support.format_cases import TIERS, sealing_plan
from tests.support.runtime_cases import UNLIKE

PAGES, TOKENS, NEWEST = (3, 1), 2, 5
COLD = 1
FORMULAS = (UNLIKE.formula, "norm(values) * exp(-norm(keys))")


@pytest.mark.parametrize("text", FORMULAS)
@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_torch_gives_each_token_of_a_bucket_the_number_of_the_host(
    tier: Tier, text: str
) -> None:
    layout = CacheLayout(sealing_plan(tier))
    host = HostPages(layout, 4 * sum(layout.page_stride))
    rng = np.random.default_rng(2)
    for pair in matrices(layout, COLD).values():
        for matrix in pair:
            for page in PAGES:
                rows = rng.normal(size=(matrix.tokens, matrix.rank))
                matrix.write(host.rows[COLD][page], rows.astype(np.float32))
    tokens = len(PAGES) * layout.plan.page_tokens - 3
    lanes = host.cached(COLD, PAGES, tokens, inputs_of(text))
    wanted = by_formula(text, lanes)
    pool = torch.from_numpy(host.memory)
    found = FormulaScores(layout, KeyFormula(text), pool).of(COLD, PAGES, tokens)
    assert wanted.shape == (len(layout.plan.index.buckets[COLD].lanes), tokens)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-12)
    order = ranked_there(found, NEWEST).numpy()
    np.testing.assert_array_equal(order, ranked(wanted, NEWEST))


@pytest.mark.parametrize("text", ["norm(keys) / norm(values)", "norm(values) / 0"])
def test_tokens_without_a_number_rank_last_and_none_before_the_newest(
    text: str,
) -> None:
    """The same by numpy and by torch: 0 / 0, and what divides by 0."""
    layout = CacheLayout(sealing_plan(TIERS[0]))
    host = HostPages(layout, 4 * sum(layout.page_stride))
    bucket = layout.plan.index.buckets[0]
    for matrix in matrices(layout, bucket.number)[bucket.lanes[0]]:
        numbers = np.ones((matrix.tokens, matrix.rank), np.float32)
        numbers[:2] = 0
        matrix.write(host.rows[bucket.number][0], numbers)
    tokens = layout.plan.page_tokens
    reads = inputs_of(text)
    wanted = by_formula(text, host.cached(bucket.number, [0], tokens, reads))
    scores = FormulaScores(layout, KeyFormula(text), torch.from_numpy(host.memory))
    found = scores.of(bucket.number, [0], tokens)
    np.testing.assert_array_equal(found.numpy(), wanted)
    order = ranked(wanted, NEWEST)[0]
    assert [*order[:NEWEST]] == [*range(tokens - NEWEST, tokens)]
    assert [*order[-2:]] == [0, 1]
    assert INPUTS.keys() == {"keys", "values"}
