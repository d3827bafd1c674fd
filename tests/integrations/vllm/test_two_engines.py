"""vLLM itself, twice in one process: tables.py says what its engines share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.integrations.vllm.test_served import (
    PYTHON,
    ROOT,
    built,
    with_windows,
)

pytestmark = pytest.mark.nightly


def test_an_engine_with_guesses_follows_one_without_in_a_process(
    tmp_path: Path,
) -> None:
    """It has twice the hot pages. Three tables of blocks each: windows and all tokens."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: run scripts/vllm_env.sh")
    model = with_windows(tmp_path / "model")
    engine = built(tmp_path, "hack:bits=4,sink=0", "vllm", model)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations/vllm")]),
        "KVLATHE_VLLM": str(engine),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [PYTHON, "-m", "tests.integrations.vllm.two_engines", str(model)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("as without guesses")
