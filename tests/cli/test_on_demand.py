"""Models in place of engines: built once, in the cache, with what was chosen said."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlathe.cli.main import run
from kvlathe.engines import cache, on_demand
from kvlathe.runtime.llm import LLM
from tests.support.adapter_cases import made_case

ASKED = ["--prompt", "t1 t2 t3", "--max-new-tokens", "4", "--json"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))


def test_a_model_is_built_once_and_says_what_was_chosen(
    reference: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(reference("llama")[0])
    said, answers = [], []
    for _ in range(2):
        assert run(["generate", model, "--compression", "hack:bits=8", *ASKED]) == 0
        out, err = capfd.readouterr()
        said.append(" ".join(err.split()))
        answers.append(json.loads(out)["token_ids"])
    assert answers[0] == answers[1]
    assert "building one with --compression hack:bits=8" in said[0]
    assert "building" not in said[1]
    (entry,) = cache.entries()
    for text in said:
        assert f"hack:bits=8 removes {entry.manifest.kv_bytes.removed:.1%}" in text
        assert "KL " in text and entry.key in text
    # One whose build ended before it was marked is found, and built no second time.
    (entry.folder / cache.MARKER).unlink()
    assert not cache.entries()
    assert run(["generate", model, "--compression", "hack:bits=8", *ASKED]) == 0
    assert "building" not in capfd.readouterr().err
    assert run(["engines", "prune", "--all"]) == 0 and not cache.entries()


def test_an_engine_stays_what_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    (engine).mkdir()
    (engine / "manifest.json").write_text("{}")
    run(["generate", str(engine), "--compression", "none", *ASKED])
    assert "is an engine. Leave it out, or name the model" in capfd.readouterr().err
    assert not cache.entries()


@pytest.mark.parametrize(
    ("named", "said"),
    [("nowhere", "does not exist"), (".", "is not an engine folder")],
)
def test_names_of_nothing_are_refused_before_anything_is_built(
    named: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(tmp_path / named), *ASKED]) == 1
    assert said in capfd.readouterr().err and not cache.root().exists()


def test_the_default_plan_keeps_kl_below_a_half_percent() -> None:
    """Accuracy by KL is exp(-KL)."""
    plan = on_demand.asked(None)
    assert (plan["compression"], plan["metric"]) == ("auto", "kl")
    accuracy = plan["accuracy"]
    assert isinstance(accuracy, float)
    assert -math.log(accuracy) == pytest.approx(0.005, rel=0.01)


def test_answers_have_the_adapter_that_is_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = made_case("llama")
    red = f"{folder / 'red'}=0.5"
    assert run(["generate", str(folder / "engine"), "--lora", red, *ASKED]) == 0
    with LLM.load(folder / "engine", threads=1, device="cpu") as llm:
        llm.load_adapter("red", red)
        plain, own = (
            llm.generate("t1 t2 t3", max_new_tokens=4, adapter=name)[0].token_ids
            for name in (None, "red")
        )
    assert json.loads(capfd.readouterr().out)["token_ids"] == own != plain
