"""The serde in LMCache itself: its processor, its adapter of files, its JSON.

`scripts/lmcache_env.sh` makes the environment; KVLATHE_LMCACHE_PYTHON names another one's
Python.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.coded_pages import need_coder

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[3]
PYTHON = Path(os.environ.get("KVLATHE_LMCACHE_PYTHON", ROOT / ".lmcache/bin/python"))


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python of the environment, which sees this checkout."""
    if not PYTHON.is_file():
        pytest.skip(f"no {PYTHON}: scripts/lmcache_env.sh makes it")
    need_coder()
    paths = f"{ROOT}:{ROOT / 'integrations/lmcache'}"
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        [str(PYTHON), *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_chunks_come_back_from_files_of_lmcache_as_the_codec_says() -> None:
    done = ran("-m", "tests.integrations.lmcache.stored_chunks")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.rstrip().endswith("as it was")


def test_the_command_is_lmcaches_own_and_knows_the_serde() -> None:
    code = (
        "import sys; from kvlathe_lmcache.main import main; sys.argv = ['x', 'server', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "from lmcache.v1.distributed.serde import get_registered_serde_types as types\n"
        "assert 'kvlathe' in types()"
    )
    done = ran("-c", code)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--l2-adapter" in done.stdout


@pytest.mark.parametrize(
    "option", ["{'bits': 5}", "{'bit': 4}", "{'max_workers': 0}", "{'bits': 16}"]
)
def test_options_that_there_are_not_are_refused(option: str) -> None:
    done = ran("-c", f"from kvlathe_lmcache.serde import make; make({option})")
    assert done.returncode and "KvlatheError" in done.stderr
