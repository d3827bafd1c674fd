"""Structures are compiled on trial: what is too much ends a process that nobody needs,
and says so; others go on."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvlathe.base.errors import EngineStopped
from kvlathe.runtime.text import trials
from kvlathe.runtime.text.guide import LIMITS, Guides, StructureError, source_of
from kvlathe.runtime.text.structure import Structure
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.runtime.text.trials import SLOW, TOO_LARGE, TOO_SLOW, Trials
from tests.support.runtime_cases import MODEL

pytest.importorskip("llguidance", reason="llguidance is not installed")
VOCABULARY = 8192
PATTERNS: list[dict[str, Any]] = [{"pattern": f"a.{{{i}}}b"} for i in range(10, 50)]
HUNGRY = Structure.json({"type": "string", "allOf": PATTERNS})
"""A string that many patterns match: an automaton of 2 to the 40. Unbounded, it takes a
minute and gigabytes."""
LONG = 60.0
"""Seconds in which a slow machine, too, takes all the memory that a trial may."""


def trial(seconds: float = SLOW) -> Trials:
    text = Tokenizer(MODEL).backend.to_str()
    setup = {"tokenizer": text, "vocabulary": VOCABULARY, "ends": [0]}
    return Trials({**setup, "limits": LIMITS}, seconds)


def test_a_structure_that_is_too_large_ends_only_its_trial() -> None:
    tried = trial(LONG)
    hungry, plain = source_of(HUNGRY), source_of(Structure.regex("[ab]{3}"))
    assert tried.reason(plain) == ""
    assert tried.reason(source_of(Structure.regex("(a"))) != ""
    assert tried.reason(hungry) == TOO_LARGE
    os.killpg(tried._process.pid, signal.SIGKILL)  # as a lack of memory may
    assert tried.reason(plain) == ""
    tried.close()
    with pytest.raises(EngineStopped):
        tried.reason(plain)
    slow = trial(0.05)
    assert slow.reason(hungry) == TOO_SLOW
    assert slow.reason(plain) == ""
    slow.close()


def test_nobody_waits_for_a_structure_that_takes_long() -> None:
    """Known ones come at once, and new ones soon. Closing ends the wait."""
    guides = Guides(Tokenizer(MODEL), VOCABULARY)
    known = Structure.regex("[ab]{3}")
    guides.guide(known)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(guides.guide, HUNGRY)
        time.sleep(0.1)
        guides.guide(known)
        assert not waiting.done()
        guides.guide(Structure.regex("[cd]{3}"))
        assert not waiting.done()
        guides.close()
        assert isinstance(waiting.exception(10), EngineStopped)


@pytest.mark.slow
def test_a_structure_refused_once_is_refused_without_a_trial() -> None:
    guides = Guides(Tokenizer(MODEL), VOCABULARY)
    with pytest.raises(StructureError, match="compiling it takes more") as refused:
        guides.guide(HUNGRY)
    guides.close()  # nothing is compiled any more
    with pytest.raises(StructureError) as again:
        guides.guide(HUNGRY)
    assert str(again.value) == str(refused.value)


def test_a_program_that_does_not_start_is_no_fault_of_the_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "PROGRAM", MODEL / "config.json")
    tried = trial()
    with pytest.raises(RuntimeError, match="ended with 1"):
        tried.reason("")
    tried.close()
