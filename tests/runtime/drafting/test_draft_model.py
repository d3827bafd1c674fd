"""Laws of draft models: they guess what they would say, leave nothing behind, and are
refused where they cannot guess."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import cast

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.engine_folder import EngineFolder
from kvlathe.plan.manifest import Manifest
from kvlathe.runtime import drafters
from kvlathe.runtime.drafting.draft_model import DraftModel
from kvlathe.runtime.loading import Wanted
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.drafts import trying
from tests.support.fake_session import SamplesThere
from tests.support.runtime_cases import (
    MODEL,
    TorchSession,
    decoder,
    llm,
    manifest_of,
    text,
)
from tests.support.schedule_cases import KINDS, engine_for, play, sequence_for


@pytest.mark.parametrize("tokens", [2000, 300])
def test_a_model_guesses_right_for_itself(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In random schedules: the model's pages hold what is known of each sequence, even where
    they do not suffice for all. Nothing is left of guesses."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 1e-5)
    drafted = accepted = 0
    for seed, kind in enumerate(KINDS):
        model = DraftModel(engine_for(KINDS[-1 - seed], tokens))
        engine, _, _ = play(seed, kind, drafter=model)
        drafted += engine.scheduler.speculation.drafted
        accepted += engine.scheduler.speculation.accepted
        assert not model._copies
        assert not model._pool.bytes_in_use
    assert accepted == drafted > 400


def test_a_draft_model_that_guesses_badly_is_tried_now_and_then() -> None:
    model = DraftModel(engine_for("sealed", 400))
    engine = engine_for("sealed", 400)
    sequence = sequence_for(engine, [1, 2, 3], 90)
    for _ in range(40):
        model.chances(sequence, 4)
        model.draft({sequence: 4}, 1.0)
        sequence.tokens.append(7)
    shares = [model.chances(sequence, 4)[0] for _ in range(60)]
    assert min(shares) < 0.05
    assert shares.count(1.0) == 3
    model.forget(sequence)
    assert not model._pool.bytes_in_use


@pytest.mark.parametrize("on_device", [False, True])
def test_answers_are_what_they_are_without_a_draft_model(on_device: bool) -> None:
    """Greedy and drawn; the draft's pages have another number format. ``on_device``:
    both sample where their logits are."""
    engine, draft = llm("torch", "one"), llm("torch", "sealed").engine
    if on_device:
        for one in (engine.engine, draft):
            one.session = SamplesThere(one.session)
    params = [
        SamplingParams(max_new_tokens=20, ignore_eos=True),
        SamplingParams(max_new_tokens=20, temperature=0.8, seed=3, ignore_eos=True),
    ]
    prompts = [list(text(90)), list(text(40, 500))]
    plain = engine.generate(prompts, params)
    model = DraftModel(draft)
    made = engine.engine.speculate(trying(model))
    guessed = engine.generate(prompts, params)
    assert [one.token_ids for one in guessed] == [one.token_ids for one in plain]
    assert all(one.accepted > 0.8 * one.drafted > 8 for one in guessed), (
        "the model does not draw as it will"
    )
    assert made.accepted <= made.drafted
    assert not draft.pool.bytes_in_use


# -- loading ---------------------------------------------------------------------------
def test_a_draft_engine_is_loaded_if_its_vocabulary_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Opening and loading a folder are tested elsewhere; here a model in torch stands for
    it."""
    made = decoder("sealed")
    manifest = manifest_of(made.plan)
    opened = cast(
        EngineFolder, SimpleNamespace(path=MODEL, plan=made.plan, manifest=manifest)
    )

    def load(_: object, given: Manifest, wanted: Wanted) -> SimpleNamespace:
        assert given is manifest
        size = wanted.cache_bytes or 0
        session = TorchSession(made, size)
        return SimpleNamespace(session=session, cache_bytes=size, memory={})

    monkeypatch.setattr(drafters, "open_engine", lambda folder, deep: opened)
    monkeypatch.setattr(drafters, "load_session", load)
    engine = llm("torch", "one")
    engine.speculate(MODEL, 3)
    speculation = engine.engine.scheduler.speculation
    assert isinstance(speculation.drafter, DraftModel)
    assert speculation.most == 3
    engine.generate([list(text(60))], SamplingParams(max_new_tokens=8))
    other = cast(Tokenizer, SimpleNamespace(backend=SimpleNamespace(get_vocab=dict)))
    with pytest.raises(KvlatheError, match="it has another vocabulary"):
        drafters.draft_engine(opened, other, engine.engine)
    padded = engine_for("one", 400)
    with pytest.raises(KvlatheError, match="it has another vocabulary"):
        drafters.draft_engine(opened, engine.tokenizer, padded)
