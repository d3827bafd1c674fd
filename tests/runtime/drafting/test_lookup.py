"""Laws of prompt look-up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.runtime.drafting.lookup import LONGEST, SHORTEST, PromptLookup, match
from kvlathe.runtime.drafting.rates import Rates, judge
from tests.support.schedule_cases import engine_for, sequence_for

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


@given(tokens=TEXTS)
def test_a_match_is_the_longest_and_the_newest(tokens: list[int]) -> None:
    length, place = match(np.array(tokens, np.int32))
    found: list[tuple[int, int]] = []
    for end in range(len(tokens) - 1):
        same = 0
        while same < min(LONGEST, end + 1):
            if tokens[end - same] != tokens[-1 - same]:
                break
            same += 1
        found.append((same, end))
    best = max(found, default=(0, -1))
    assert (length, place) == (best if best[0] else (0, -1))


@given(
    tokens=st.lists(st.integers(0, 5), min_size=2, max_size=12), most=st.integers(1, 9)
)
def test_a_text_that_repeats_is_guessed_to_go_on(tokens: list[int], most: int) -> None:
    """Past what is known of the repetition, too."""
    engine = engine_for("one", 400)
    sequence = sequence_for(engine, tokens * 5, 30)
    lookup = PromptLookup()
    chances = lookup.chances(sequence, most)
    assert len(chances) == most
    (guess,) = lookup.draft({sequence: most}, 0)
    assert guess == (tokens * 9)[:most]
    assert lookup.draft({sequence: 1}, 0) == [guess[:1]]


@given(texts=st.lists(TEXTS, min_size=2, max_size=6))
def test_tokens_that_come_in_any_pieces_are_looked_up_alike(
    texts: list[list[int]],
) -> None:
    engine = engine_for("one", 400)
    whole = [token for text in texts for token in text]
    grown = sequence_for(engine, list(texts[0]), 30)
    lookup = PromptLookup()
    for text in texts[1:]:
        lookup.chances(grown, 5)
        grown.tokens += text
    known = sequence_for(engine, whole, 30)
    count = len(lookup.chances(grown, 5))
    assert count == len(lookup.chances(known, 5))
    length, _ = match(np.array(whole, np.int32))
    assert bool(count) == (length >= SHORTEST)
    assert lookup.draft({grown: 5}, 0) == lookup.draft({known: 5}, 0)


def test_prompt_lookup_learns_how_often_guesses_are_right() -> None:
    """Learnt from guesses that no row was spent on."""
    engine = engine_for("one", 400)
    lookup = PromptLookup()
    faithful = sequence_for(engine, [1, 2, 3, 4, 5, 6] * 3, 90)
    random = np.random.default_rng(1)
    for step in range(60):
        lookup.chances(faithful, 4)
        faithful.tokens.append(1 + step % 6)
    sure = lookup.chances(faithful, 4)[0]
    fickle = sequence_for(engine, [1, 2] * 9, 90)
    for _ in range(60):
        lookup.chances(fickle, 4)
        fickle.tokens += [1, 2, int(random.integers(3, 9))]
    assert sure > 0.95
    fickle.tokens += [1, 2]
    assert lookup.chances(fickle, 4)[0] < 0.5
    lookup.forget(fickle)
    lookup.forget(faithful)


def test_only_guesses_that_could_be_judged_count() -> None:
    rates = Rates([0.5] * 4, 0.1)
    judge([7, 8, 9], [7], 1, [rates])
    assert [rates.of(kind) for kind in range(5)] == [0.5, 0.55, 0.5, 0.5, 0.5]
    judge([7, 8, 9], [7, 1, 9], 2, [rates])
    assert rates.of(2) == 0.55
    assert rates.of(9) == rates.of(3) == 0.45
