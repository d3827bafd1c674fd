"""Gradients of scores are those of autograd, however many places are taken at a time;
labels are drawn as the model says."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvlathe.export.methods.forms import Part
from kvlathe.export.model.plain_attention import PlainAttention
from kvlathe.export.model.sliced_head import Slopes
from kvlathe.export.search import readings, sensitivity
from kvlathe.export.search.sealed import rounded
from kvlathe.plan.formats import Format
from kvlathe.plan.lives import Window

WORDS = 40


def dense(slopes: Slopes, words: int = WORDS) -> Tensor:
    """[S, R, V]."""
    scores, rows, _ = slopes.tokens.shape
    whole = slopes.weights.new_zeros(scores, rows, words)
    whole.scatter_add_(-1, slopes.tokens, slopes.weights)
    return whole if slopes.shares is None else whole - slopes.shares


@given(st.integers(1, 3000), st.integers(0, 40000))
def test_positions_are_spread_over_all_that_is_served(tokens: int, gaps: int) -> None:
    """They rise from 0 to the end, whole pieces in a row and equal gaps between them."""
    found = readings.spread(tokens, gaps)
    if tokens <= readings.PIECE:
        assert found == tuple(range(tokens))
        return
    assert found[0] == 0 and found[-1] == tokens + gaps - 1
    steps = [after - before for before, after in itertools.pairwise(found)]
    jumps = steps[(tokens - 1) % readings.PIECE :: readings.PIECE]
    assert sum(jumps) - len(jumps) == gaps and max(jumps) - min(jumps) <= 1
    assert sorted(steps) == sorted([1] * (tokens - 1 - len(jumps)) + jumps)


@given(st.integers(0, 10**6), st.integers(1, 7))
def test_slopes_of_text_are_those_of_its_log_probability(seed: int, size: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(9, WORDS, generator=draw, dtype=torch.double)
    chance = torch.rand(2, 9, generator=draw)
    for start in range(0, 9, size):
        rows = slice(start, start + size)
        found = readings.text_score(logits[rows].clone(), chance[:, rows], rows)
        for labels, slopes in zip(found.tokens, dense(found), strict=True):
            own = logits[rows].clone().requires_grad_()
            own.log_softmax(-1).gather(-1, labels).sum().backward()
            torch.testing.assert_close(slopes, own.grad)


def test_labels_come_as_often_as_the_model_says() -> None:
    """Chances spread evenly over [0, 1) hit each word in proportion to its share, also
    at either end."""
    draw = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(1, WORDS, generator=draw)
    shares = logits.softmax(-1)[0]
    chance = ((torch.arange(20000) + 0.5) / 20000)[:, None]
    found = readings.text_score(logits, chance, slice(0, 1)).tokens[:, 0, 0]
    counts = torch.bincount(found, minlength=WORDS) / 20000
    assert float((counts - shares).abs().max()) < 1.1e-4
    ends = torch.tensor([[0.0], [1.0]])
    cut = torch.zeros(1, WORDS)
    cut[0, [0, -1]] = -torch.inf
    first, last = readings.text_score(cut, ends, slice(0, 1)).tokens[:, 0, 0].tolist()
    assert first == 1 and last >= WORDS - 2


@given(st.integers(0, 10**6), st.integers(1, 7))
def test_slopes_of_answers_are_those_of_their_margins(seed: int, size: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(9, WORDS, generator=draw, dtype=torch.double)
    answer = torch.randint(WORDS, (9,), generator=draw).tolist()
    chance = torch.rand(2, 9, generator=draw)
    score = readings.margin_score(answer)
    for start in range(0, 9, size):
        rows = slice(start, start + size)
        slopes = dense(score(logits[rows].clone(), chance[:, rows], rows))
        for signs, found in zip(chance[:, rows], slopes, strict=True):
            own = logits[rows].clone().requires_grad_()
            total = own.new_zeros(())
            for row, (label, sign) in enumerate(
                zip(answer[rows], signs.tolist(), strict=True)
            ):
                others = torch.cat([own[row, :label], own[row, label + 1 :]])
                margin = own[row, label] - others.max()
                size_of = max(abs(margin.item()), readings.LEAST_MARGIN)
                total = total + (1 if sign >= 0.5 else -1) * margin / size_of
            total.backward()
            torch.testing.assert_close(found, own.grad)


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(0, 90))
def test_a_window_sees_by_positions(seed: int, tokens: int, gaps: int) -> None:
    """Its move is that of plain attention over the tokens whose positions it holds,
    wherever positions are left out."""
    draw = torch.Generator().manual_seed(seed)
    page, life = 8, Window(8, 16)
    q, pull = (torch.randn(*x, tokens, 4, generator=draw) for x in ((2,), (3, 2)))
    k, v = torch.randn(2, tokens, 4, generator=draw)
    skipped = torch.randint(gaps + 1, (tokens,), generator=draw)
    positions = torch.arange(tokens) + skipped.sort().values
    lane = sensitivity.ObservedLane(q, k, v, pull)
    moves = sensitivity.LaneMoves(lane, page, sensitivity.Queries.all(tokens))
    places = [*positions.tolist(), *[10**6] * (-tokens % page)]
    first = sensitivity.first_seen(life.sees, places, page, q.device)
    (found,) = moves.windows([first], torch.tensor(places))
    own_page = positions[:, None] // page * page
    seen = (positions < 8) | (positions >= own_page - 16)
    causal = torch.ones(tokens, tokens).tril().bool()
    scores = (q @ k.mT).masked_fill(~causal, -torch.inf)
    change = (
        scores.masked_fill(~seen, -torch.inf).softmax(-1) - scores.softmax(-1)
    ) @ v
    expected = torch.einsum("sgtd,gtd->st", pull, change).square().sum()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("sink", "softcap"), [(None, 0), (-5.0, 0), (None, 20.0)])
@pytest.mark.parametrize("strength", [1.0, 4.0, 12.0, 40.0])
def test_float32_prices_of_a_sharp_key_are_those_of_float64(
    strength: float, sink: float | None, softcap: float
) -> None:
    """However much of the attention one coded key has, and however far codes or a window
    move its score: plain attention in float64 over the same codes."""
    draw = torch.Generator().manual_seed(5)
    tokens, page, life = 64, 8, Window(8, 16)
    k, v = torch.randn(2, tokens, 16, generator=draw)
    k[20] *= 3
    q = strength * k[20] / k[20].norm() + torch.randn(2, tokens, 16, generator=draw) / 4
    pull = torch.randn(3, 2, tokens, 16, generator=draw)
    sinks = None if sink is None else torch.tensor([sink, 2 * sink])
    causal = torch.ones(tokens, tokens).tril().bool()
    of_page = torch.arange(tokens) // page

    def attended(keys: Tensor, hidden: Tensor) -> Tensor:
        scores = (q.double()[:, :, None] * keys.double()).sum(-1)
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        scores = scores.masked_fill(~causal | hidden, -torch.inf)
        if sinks is not None:
            beside = sinks.double()[:, None, None].expand(-1, tokens, 1)
            scores = torch.cat([scores, beside], -1)
        return scores.softmax(-1)[..., :tokens] @ v.double()

    def squares(after: Tensor) -> float:
        change = after - attended(k[None], ~causal)
        moves = torch.einsum("sgtd,gtd->st", pull.double(), change)
        return moves.square().sum().item()

    codes = tuple(Format(bits, "rank", 64) for bits in (2, 3, 4))
    form = sensitivity.Candidate(torch.eye(16), torch.eye(16), torch.zeros(16), codes)
    moves = sensitivity.LaneMoves(
        sensitivity.ObservedLane(q, k, v, pull),
        page,
        sensitivity.Queries.all(tokens),
        PlainAttention(1.0, softcap=softcap, sinks=sinks),
        [Part(), Part(0, 0, 16), Part(0, 16, 0, 0)],
    )
    before = of_page[:, None] - of_page
    parts = [before > 0, before > 2, (before > 0) & (of_page < 2)]
    for code, found in zip(codes, moves.keys([form]), strict=True):
        read = [torch.where(x[..., None], rounded(k, code, page), k) for x in parts]
        expected = [squares(attended(keys, ~causal)) for keys in read]
        assert found.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    first = sensitivity.first_seen(life.sees, range(tokens), page, q.device)
    (found,) = moves.windows([first], torch.arange(tokens))
    unseen = (before > 2) & (of_page > 0)
    expected = squares(attended(k[None], unseen))
    assert found.item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
