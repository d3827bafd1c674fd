"""Laws of layers that guess tokens, on the cuda backend's session in host memory: they
guess what the published formula says, and answers are what they are without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime import drafters
from kvlathe.runtime.drafting.guessing_layer import GuessingLayer
from kvlathe.runtime.drafting.hidden_rows import MOST, Trail
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.device_engines import engine_of
from tests.support.drafts import trying
from tests.support.guessing_cases import Formula, make_guessing
from tests.support.nightly import rest_nightly

NAMES = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")
NAMES += ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=40, temperature=0.8, seed=3, ignore_eos=True)


class Noting(GuessingLayer):
    """Keeps what it guessed, and for which tokens."""

    notes: list[tuple[Sequence, list[int], list[int]]]

    def draft(self, counts: Mapping[Sequence, int], seconds: float) -> list[list[int]]:
        guesses = super().draft(counts, seconds)
        self.notes += [
            (one, list(one.tokens), guess)
            for one, guess in zip(counts, guesses, strict=True)
        ]
        return guesses


def noting(native: Native, folder: Path) -> Noting:
    layer = Noting(engine_of(native, folder, guesses=True).engine)
    layer.notes = []
    return layer


def prompts() -> list[list[int]]:
    random = np.random.default_rng(2)
    return [random.integers(0, 97, count).tolist() for count in (5, 40, 150)]


@pytest.mark.parametrize("name", rest_nightly(NAMES, "glm4_moe"))
def test_a_layer_guesses_what_the_published_formula_says(
    name: str, native: Native, tmp_path: Path
) -> None:
    """Behind known tokens and behind its own guesses. Answers are those without it, to
    the token, greedy and drawn; nothing is left of it."""
    make_guessing(tmp_path, name)
    llm, layer = engine_of(native, tmp_path), noting(native, tmp_path)
    params = [GREEDY, DRAWN, GREEDY]
    plain = llm.generate(prompts(), params)
    made = llm.engine.speculate(trying(layer))
    answers = llm.generate(prompts(), params)
    assert [x.token_ids for x in answers] == [x.token_ids for x in plain]
    assert made.failures == 0 < made.drafted
    formula = Formula(tmp_path, name)
    right = wrong = 0
    for sequence, tokens, guess in layer.notes:
        if sequence.params.temperature:
            continue
        first = sequence.prompt_tokens - 1
        expected = formula.guesses(tokens, first, len(guess))
        right += guess == expected
        wrong += guess != expected
    assert right > 15
    assert wrong <= right / 20  # pages are halves: two tokens may be as good
    assert not layer._copies and not layer._owners and not layer._hidden._trails
    assert not layer._pool.bytes_in_use


def test_right_guesses_stay(native: Native, tmp_path: Path) -> None:
    """A layer was made to be right. Sequences are computed again between, so that
    what it reads has gaps."""
    make_guessing(tmp_path, quiet=True)
    llm, layer = engine_of(native, tmp_path), noting(native, tmp_path)
    params = [GREEDY, DRAWN, GREEDY]
    plain = llm.generate(prompts(), params)
    llm.engine.speculate(trying(layer))
    sequences = [llm.sequence(*each) for each in zip(prompts(), params, strict=True)]
    request = llm.thread.submit(sequences)
    scheduler = llm.engine.scheduler
    for _ in range(4):
        llm.thread.call(
            lambda: scheduler.preempt() if len(scheduler.running) > 1 else None
        )
    llm.thread.wait(request)
    answers = [one.tokens[one.prompt_tokens :] for one in sequences]
    assert answers == [list(one.token_ids) for one in plain]
    drafted, accepted = (
        sum(getattr(one, name) for one in sequences) for name in ("drafted", "accepted")
    )
    assert accepted > 0.6 * drafted > 40
    assert not layer._pool.bytes_in_use


def test_remembered_hidden_rows_have_no_gap() -> None:
    """Against a dictionary, at random places."""
    random = np.random.default_rng(0)
    trail, known = Trail(), dict[int, int]()
    place = 0
    for number in range(3000):
        move = random.choice(["next", "back", "gap"], p=[0.97, 0.02, 0.01])
        if move == "back":
            place = max(0, place - int(random.integers(1, 6)))
        if move == "gap":
            place += int(random.integers(1, 40))
        known = {at: x for at, x in known.items() if at < place}
        if place - 1 not in known:
            known = {}
        known[place] = number
        known = {at: known[at] for at in sorted(known)[-MOST:]}
        trail.add(place, (None, number))
        assert trail.of(trail.first, MOST) == [(None, x) for x in known.values()]
        assert (trail.first, trail.end) == (min(known), place + 1)
        place += 1


def test_a_layer_is_refused_where_it_cannot_read(
    native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a model of another width, one that gives no hidden states, and one that
    computes elsewhere. Opening and loading are tested with engines."""
    make_guessing(tmp_path)
    llm = engine_of(native, tmp_path)
    layer = engine_of(native, tmp_path, guesses=True).engine
    manifest = SimpleNamespace(reads_hidden=True)
    opened = SimpleNamespace(path=tmp_path, plan=layer.pool.plan, manifest=manifest)
    monkeypatch.setattr(drafters, "open_engine", lambda folder, deep: opened)
    monkeypatch.setattr(drafters, "draft_engine", lambda *_: layer)
    llm.speculate(tmp_path)
    assert isinstance(llm.engine.scheduler.speculation.drafter, GuessingLayer)
    for capabilities, words in (
        (("samples",), "without hidden states"),
        (("hidden_states",), "one of them computes on a GPU"),
    ):
        monkeypatch.setattr(type(llm.session), "capabilities", frozenset(capabilities))
        monkeypatch.setattr(type(layer.session), "capabilities", {"samples"})
        with pytest.raises(KvlatheError, match=words):
            llm.speculate(tmp_path)
    narrow = replace(layer.pool.plan.model, hidden_size=32)
    opened.plan = SimpleNamespace(model=narrow)
    with pytest.raises(KvlatheError, match="hidden states of 32 numbers"):
        llm.speculate(tmp_path)
