"""Gradients of scores are those of autograd, however many places are taken at a time;
labels are drawn as the model says."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvlathe.export.model.sliced_head import Slopes
from kvlathe.export.search import readings

WORDS = 40


def dense(slopes: Slopes, words: int = WORDS) -> Tensor:
    """[S, R, V]."""
    scores, rows, _ = slopes.tokens.shape
    whole = slopes.weights.new_zeros(scores, rows, words)
    whole.scatter_add_(-1, slopes.tokens, slopes.weights)
    return whole if slopes.shares is None else whole - slopes.shares


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
