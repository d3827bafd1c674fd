"""A server under load for as long as a night allows."""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runtime_cases import built_folder
from tests.test_architecture import ROOT

SECONDS = 1200


@pytest.mark.nightly
def test_memory_of_a_server_stays_flat_and_its_answers_stay_right(
    tmp_path: Path,
) -> None:
    """The benchmark fails where an answer differs from the one alone, a page is left or
    memory grows by half a megabyte a minute."""
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
