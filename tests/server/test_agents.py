"""LangChain's ChatOpenAI and pydantic-ai against the server, in an environment of their
own (scripts/clients_env.sh)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runtime_cases import llm
from tests.support.serving_cases import Served, serving, with_template
from tests.support.tool_cases import HERMES

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".clients" / "bin" / "python"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    with serving(with_template(llm("torch", "split"), HERMES)) as found:
        yield found
        assert found.idle()


def test_langchain_and_pydantic_ai_get_what_they_ask_for(hermes: Served) -> None:
    if not PYTHON.is_file():
        pytest.skip("scripts/clients_env.sh has not made .clients")
    done = subprocess.run(
        [PYTHON, ROOT / "tests" / "support" / "agents.py", f"{hermes.url}/v1"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    chain, agent = found["langchain"], found["pydantic_ai"]
    for weather in (chain["schema"], chain["call"], *agent.values()):
        assert weather["sky"] in ("clear", "cloudy") and len(weather["city"]) <= 8
    assert chain["tool"]["city"] in ("Bern", "Rome") and chain["then"]
    assert chain["streamed"] == [chain["tool"]]
