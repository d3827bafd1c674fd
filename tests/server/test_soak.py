"""A server under load for as long as a night allows."""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.serve_soak import growth_of
from tests.support.runtime_cases import built_folder
from tests.test_architecture import ROOT

SECONDS = 1200
EVERY = np.arange(400) / 30
"""Minutes of a run's last two thirds, every two seconds."""


def noise(seed: int) -> npt.NDArray[np.float64]:
    """Memory that is free within the process comes and goes by a megabyte."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, len(EVERY))


@pytest.mark.parametrize("at", [0, 40, 200, 390])
def test_one_step_of_an_arena_is_no_leak(at: int) -> None:
    """ONNX Runtime's takes more where a step is the largest so far, at any time."""
    mb = 180 + noise(at) + 6.7 * (np.arange(len(EVERY)) >= at)
    found = growth_of(EVERY, mb)
    assert abs(found.slope) < 0.05
    assert len(found.steps) == (at > 0)
    assert not found.leaks


LEAKS = {
    "drops": 0.55 * EVERY,
    "arenas of Python": np.floor(0.55 * EVERY),  # a megabyte each
    "drops and a step": 0.55 * EVERY + 6.7 * (EVERY > 5),
    "arrays": 8.0 * (EVERY // 6),
    "some minutes of drops": np.minimum(1.0 * EVERY, 9.0),
    "the last minutes": 3.0 * np.maximum(0.0, EVERY - EVERY[-1] + 4.0),
    "a step beyond an arena's": 60.0 * (EVERY > 5),
    "a small step beyond an arena's": 20.0 * (EVERY > 5),
}


@pytest.mark.parametrize("name", LEAKS)
def test_more_than_half_a_megabyte_a_minute_and_one_arena_is_a_leak(name: str) -> None:
    assert growth_of(EVERY, 180 + noise(1) + LEAKS[name]).leaks


@pytest.mark.parametrize("step", [4.2, 9.1, 16.8])
def test_an_arenas_step_and_a_slow_rise_are_no_leak(step: float) -> None:
    """The last run of twenty minutes took a step of 9.1 MB and was flat beside it."""
    mb = 181.9 + noise(3) + 0.1 * EVERY + step * (EVERY > 2)
    assert not growth_of(EVERY, mb).leaks


def test_memory_that_goes_and_comes_back_is_no_leak() -> None:
    mb = 180 + noise(2) - 6.0 * (EVERY.astype(int) % 3 == 1)
    assert not growth_of(EVERY, mb).leaks


@pytest.mark.nightly
def test_memory_of_a_server_stays_flat_and_its_answers_stay_right(
    tmp_path: Path,
) -> None:
    """The benchmark fails where an answer differs from the one alone, a page is left or
    memory grows by half a megabyte a minute, one step of an arena aside."""
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)  # pytest's is shorter
    engine = built_folder(tmp_path, "sealed")
    command = [sys.executable, "-m", "benchmarks.serve_soak", "--engine", str(engine)]
    load = ["--clients", "60", "--seconds", str(SECONDS), "--rounds", "4"]
    done = subprocess.run(
        [*command, *load], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, (said, done.stderr[-2000:])
    assert said["counts"]["whole"] > 1000
    assert said["rss_mb_a_minute"] < 0.5
