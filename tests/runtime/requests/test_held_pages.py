"""Laws of pages that are held between two pools: others wait for them and end, and
nobody's error is hidden."""

from __future__ import annotations

import threading

import pytest

from kvlathe.base.errors import EngineStopped
from kvlathe.runtime.requests.held_pages import HeldPages
from kvlathe.runtime.scheduling.scheduler import Scheduled
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.prefix_cases import forget, sharing
from tests.support.runtime_cases import llm, text

PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("kind", ["departure", "arrival"])
def test_who_finds_no_page_waits_until_held_ones_come_back(kind: str) -> None:
    """A prompt that fits the cache alone, beside pages that are held."""
    prompt = list(text(1300, 700))
    with llm("torch", "one", 1024) as alone:
        expected = alone.generate([prompt], PARAMS)[0].token_ids
    engine = sharing("one", tokens=1024)
    engine.generate([text(600)], PARAMS)
    held: HeldPages = engine.exchange.export_prefix(text(600))
    if kind == "arrival":
        with held:
            arrival = engine.exchange.expect(held.parcel)
        held = arrival
    request = engine.thread.submit([engine.sequence(list(prompt), PARAMS)])
    steps = 0
    schedule = engine.engine.scheduler.schedule

    def counted() -> Scheduled:
        nonlocal steps
        steps += 1
        return schedule()

    assert not request.done.wait(0.3)
    engine.engine.scheduler.schedule = counted
    assert not request.done.wait(0.3)
    assert 0 < steps < 100  # it waits; it does not spin
    held.close()
    engine.thread.wait(request)
    assert request.sequences[0].answer == expected
    forget(engine)


def test_closing_twice_lets_others_wait_for_whoever_is_left() -> None:
    engine = sharing("one")
    engine.generate([text(600)], PARAMS)
    first, second = (engine.exchange.export_prefix(text(600)) for _ in range(2))
    scheduler = engine.engine.scheduler
    first.close()
    first.close()
    assert scheduler._borrowers == 1
    second.close()
    assert scheduler._borrowers == 0
    forget(engine)


def test_an_engine_that_stops_hides_no_error() -> None:
    """``alive`` may be true just before ``stop``: the body's own error is raised."""
    engine = sharing("one")
    engine.generate([text(600)], PARAMS)
    departure = engine.exchange.export_prefix(text(600))
    with pytest.raises(ZeroDivisionError), departure:
        engine.thread.close()
        engine.thread.__class__ = type(
            "Late", (type(engine.thread),), {"alive": property(lambda _: True)}
        )
        raise ZeroDivisionError
    departure.close()
    with pytest.raises(EngineStopped):
        engine.thread.call(lambda: None)


def test_a_prefill_ends_with_the_thread_that_runs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody tells of a first token there: the thread died while it ended others."""
    with llm("torch", "one") as engine:
        monkeypatch.setattr(engine.thread, "submit", lambda *_: None)
        monkeypatch.setattr(engine.thread, "end", lambda _: None)
        stopped = threading.Timer(0.2, engine.thread.stop)
        stopped.start()
        with pytest.raises(EngineStopped):
            engine.exchange.prefill(engine.sequence(list(text(20)), PARAMS))
