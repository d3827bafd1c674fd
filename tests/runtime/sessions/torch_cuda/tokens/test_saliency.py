"""Tokens that torch ranks where their scores are: those that the host ranks, to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.plan.moves import Selection, Target
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.sessions.host import passes
from kvlathe.runtime.sessions.host import saliency as host
from kvlathe.runtime.sessions.protocols import Scores
from kvlathe.runtime.sessions.torch_cuda.tokens import saliency as device
from kvlathe.runtime.sessions.torch_cuda.tokens import stages


@st.composite
def windows(draw: st.DrawFn) -> ObservationWindow:
    return ObservationWindow(
        recent=0.1,
        normalized=draw(st.booleans()),
        pooling=draw(st.sampled_from([1, 3, 7])),
        noise=draw(st.sampled_from([0.0, 0.5, 2.0])),
    )


def scores_of(rng: np.random.Generator, lanes: int, tokens: int, kinds: int) -> Scores:
    """``kinds`` different numbers, so that tokens are equally salient."""
    attention = rng.integers(kinds, size=(lanes, tokens)) / np.float32(7 * kinds)
    rows = [np.sort(rng.permutation(3 * tokens)[:tokens]) for _ in range(lanes)]
    return Scores(attention.astype(np.float32), np.stack(rows).astype(np.int32))


def found_by_torch(
    window: ObservationWindow,
    scores: Scores,
    seen: npt.NDArray[np.int64],
    keys: list[int],
) -> torch.Tensor:
    assert scores.position is not None
    return device.saliency(
        window,
        torch.from_numpy(scores.attention),
        torch.from_numpy(scores.position),
        torch.from_numpy(seen),
        torch.tensor(keys),
    )


@given(
    window=windows(),
    lanes=st.integers(1, 4),
    tokens=st.integers(8, 90),
    kinds=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 2**16),
)
def test_torch_ranks_and_selects_as_the_host(
    window: ObservationWindow, lanes: int, tokens: int, kinds: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = scores_of(rng, lanes, tokens, kinds)
    seen = rng.integers(3, size=3 * tokens)
    keys = rng.integers(2**32, size=lanes).tolist()
    expected = host.saliency(window, scores, seen, keys)
    found = found_by_torch(window, scores, seen, keys)
    np.testing.assert_array_equal(found.numpy(), expected)
    newest, half = int(rng.integers(0, 8)), tokens // 2
    order = host.ranked(expected, newest)
    np.testing.assert_array_equal(device.ranked(found, newest).numpy(), order)
    targets = (
        Target(0, ((0, half),)),
        Target(1, ((half, half + 2), (tokens - 2, tokens))),
    )
    selection = Selection(0, tokens, newest, targets)
    for target, places in zip(targets, host.selected(selection, order), strict=True):
        mine = device.selected(target, torch.from_numpy(order))
        np.testing.assert_array_equal(mine.numpy(), places)


@given(st.integers(9, 60), st.sampled_from([1, 3, 1000]), st.integers(0, 2**16))
def test_the_same_rows_of_a_prompt_stay(rows: int, kinds: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    attention = rng.integers(kinds, size=rows).astype(np.float64)
    count = int(rng.integers(1, rows + 1))
    expected = passes.survivors(attention, count, 8)
    found = stages.survivors(torch.from_numpy(attention), count, 8)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_saliency_reads_only_the_scores_that_a_window_needs() -> None:
    rng = np.random.default_rng(0)
    scores = scores_of(rng, 2, 20, 5)
    plain = ObservationWindow(last=8)
    attention = torch.from_numpy(scores.attention)
    found = device.saliency(plain, attention, None, None, None)
    expected = host.saliency(plain, dataclasses.replace(scores, position=None))
    np.testing.assert_array_equal(found.numpy(), expected)
