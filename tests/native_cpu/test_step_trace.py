"""A decode step is read in few places: the calls, the files and the frames between
Engine.step and the model are counted."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pytest

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native_cpu.test_session import native_llm
from tests.support.fake_session import SamplesThere
from tests.support.runtime_cases import text
from tests.test_architecture import ROOT

MOST_FILES = 15
MOST_CALLS = 112
MOST_FRAMES = 4
"""From Engine.step to the session's run or start, that one counted."""
PROMPT, ANSWER, STEPS = 37, 12, 4


@dataclass
class Trace:
    """Calls of our own functions; those that dataclasses generate are nobody's file.

    ``files``: of the product, in which functions were called; ``calls``: how many were.
    ``frames``: the functions that were open when ``model`` was called first.
    """

    model: str
    files: set[str] = field(default_factory=set[str])
    calls: int = 0
    frames: list[str] = field(default_factory=list[str])
    _open: list[str] = field(default_factory=list[str])

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """As sys.setprofile takes it."""
        file = Path(frame.f_code.co_filename).resolve()
        if not file.is_relative_to(ROOT) or ".venv" in file.parts or not file.is_file():
            return
        if event == "return":
            self._open.pop()
        if event != "call":
            return
        self._open.append(frame.f_code.co_qualname)
        if not file.is_relative_to(ROOT / "tests"):
            self.files.add(file.relative_to(ROOT).as_posix())
            self.calls += 1
        if frame.f_code.co_qualname == self.model and not self.frames:
            self.frames = list(self._open)


def traced(llm: LLM, model: str) -> Trace:
    """A decode step of one sequence, some steps after its prompt."""
    engine = llm.engine
    params = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    engine.scheduler.add(llm.sequence(list(text(PROMPT)), params))
    for _ in range(STEPS):
        engine.step()
    trace = Trace(model)
    sys.setprofile(trace)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    assert trace.frames[0] == "Engine.step"
    return trace


@pytest.mark.parametrize("kind", ["one", "sealed"])
def test_a_decode_step_is_few_calls_in_few_files(native: Native, kind: str) -> None:
    with native_llm(native, kind) as llm:
        trace = traced(llm, "NativeSession.run")
    assert 2 <= len(trace.frames) - 1 <= MOST_FRAMES, trace.frames
    assert 8 <= len(trace.files) <= MOST_FILES, sorted(trace.files)
    assert 40 <= trace.calls <= MOST_CALLS


def test_a_step_that_flies_has_as_few_frames(native: Native) -> None:
    """A session that samples is given it before the tokens of the last one are known."""
    with native_llm(native, "one") as llm:
        llm.engine.session = SamplesThere(llm.session)
        trace = traced(llm, "SamplesThere.start")
    assert 2 <= len(trace.frames) - 1 <= MOST_FRAMES, trace.frames
