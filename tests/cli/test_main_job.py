"""The main job as a user runs it, on the shipped model: build, look, write, measure.
Every result is a JSON object."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlathe.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models/lathe-5m"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def kvlathe(home: Path, *arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON object, standard error."""
    command = [sys.executable, "-m", "kvlathe", *map(str, arguments), "--json"]
    environment = os.environ | {"KVLATHE_CACHE": str(home / "cache")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def inside(home: Path, *arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    """The same, by the same command, without a process of its own."""
    said, log = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(log),
    ):
        patch.setenv("KVLATHE_CACHE", str(home / "cache"))
        code = run([*map(str, arguments), "--json"])
    return code, json.loads(said.getvalue()), log.getvalue()


@pytest.fixture(scope="module")
def engines(home: Path) -> dict[str, Path]:
    """An uncompressed engine, and one of fewer dimensions that computes on codes. They
    are built in this process, which has the libraries of a build already."""
    sizes = {
        "none": ["--compression", "none"],
        "codes": ["--compression", "hack:bits=8+fdc", "--compression_ratio", "0.55"],
    }
    for name, size in sizes.items():
        code, built, log = inside(
            home,
            "build",
            "--model",
            MODEL,
            "--output_dir",
            home / name,
            *size,
            "--max-seq-len",
            "1024",
        )
        assert code == 0, log
        assert Path(built["engine"]) == home / name and Path(built["report"]).is_file()
    return {name: home / name for name in sizes}


@pytest.mark.slow
def test_inspect_shows_the_plan_that_was_built(
    home: Path, engines: dict[str, Path]
) -> None:
    found = {}
    for name, engine in engines.items():
        code, shown, _ = kvlathe(home, "inspect", engine)
        assert code == 0 and shown["limits"]["max_seq_len"] == 1024
        assert shown["attention"]
        kept = sum(lane["rank_k"] + lane["rank_v"] for lane in shown["lanes"])
        found[name] = shown["kv_bytes_removed"], shown["kv_bytes_per_token"] / kept
    assert found["none"] == (0, pytest.approx(2))
    removed, bytes_a_number = found["codes"]
    assert removed >= 0.55 and 1 < bytes_a_number < 1.2


def test_the_engine_finds_the_line_it_is_asked_for(
    home: Path, engines: dict[str, Path]
) -> None:
    row = json.loads(
        (ROOT / "data/line_retrieval.jsonl").read_text(encoding="utf-8").splitlines()[0]
    )
    (home / "prompt.txt").write_text(row["prompt"], encoding="utf-8")
    for engine in engines.values():
        code, answer, _ = kvlathe(
            home,
            "generate",
            engine,
            "--prompt-file",
            home / "prompt.txt",
            "--stop",
            ">",
        )
        assert (
            code == 0
            and answer["text"] == row["answer"].removesuffix(">")
            and answer["finish_reason"] == "stop"
        )
        assert answer["timings"]["decode_tokens_per_second"] > 0


def test_the_example_of_the_readme_runs(
    engines: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    example = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition("```python\n")[2]
        .partition("```")[0]
    )
    assert "out/auto" in example
    exec(example.replace("out/auto", str(engines["codes"])), {})
    assert len(capsys.readouterr().out.split()) > 20


def test_eval_has_the_keys_that_scripts_read(
    home: Path, engines: dict[str, Path]
) -> None:
    lines = (
        (ROOT / "data/line_retrieval.jsonl").read_text(encoding="utf-8").splitlines()
    )
    (home / "few.jsonl").write_text("\n".join(lines[:9]), encoding="utf-8")
    texts = (ROOT / "data/eval_text.jsonl").read_text(encoding="utf-8").splitlines()
    (home / "text.jsonl").write_text("\n".join(texts[:2]), encoding="utf-8")
    arguments = (
        "--baseline",
        engines["none"],
        "--retrieval",
        home / "few.jsonl",
        "--text",
        home / "text.jsonl",
    )
    code, scores, log = kvlathe(home, "eval", engines["codes"], *arguments)
    assert code == 0, log
    assert (
        1 <= scores["perplexity_ratio"] < 3
        and 0.3 < scores["agreement"] <= 1
        and scores["kl"] > 0
    )
    assert (
        scores["kv_bytes_removed"] >= 0.55 and 0 <= scores["retrieval_exact_match"] <= 1
    )


def test_comparing_an_engine_with_itself_finds_nothing(
    home: Path, engines: dict[str, Path]
) -> None:
    code, same, _ = kvlathe(home, "compare", engines["none"], engines["none"])
    assert code == 0 and same["max_logit_difference"] == 0 and same["agreement"] == 1
    assert same["tokens"] >= 256 and same["reached"]


def test_a_comparison_reaches_what_an_engine_quantizes_or_says_that_it_does_not(
    home: Path, engines: dict[str, Path]
) -> None:
    both = engines["none"], engines["codes"]
    code, unlike, _ = kvlathe(home, "compare", *both)
    assert code == 0 and unlike["reached"] and unlike["kl"] > 0
    code, short, log = kvlathe(home, "compare", *both, "--prompt", "def main():")
    assert code == 0 and not short["reached"]
    assert "what they do to older tokens is not compared" in " ".join(log.split())


def test_finished_builds_are_listed_and_removed(
    home: Path, engines: dict[str, Path]
) -> None:
    listed = kvlathe(home, "engines", "list")[1]["engines"]
    assert {x["compression"] for x in listed} == {"none", "hack:bits=8+fdc"}
    assert len(kvlathe(home, "engines", "prune", "--all")[1]["engines"]) == 2
    assert kvlathe(home, "engines", "list")[1]["engines"] == []


def test_an_existing_folder_is_not_written_to(
    home: Path, engines: dict[str, Path]
) -> None:
    before = sorted((p.name, p.stat().st_mtime) for p in engines["none"].iterdir())
    code, refused, log = kvlathe(
        home, "build", "--model", MODEL, "--output_dir", engines["none"]
    )
    assert code == 1 and "exists" in refused["error"] and log.startswith("error: ")
    assert (
        sorted((p.name, p.stat().st_mtime) for p in engines["none"].iterdir()) == before
    )


def test_a_prompt_beyond_the_limits_is_refused(
    home: Path, engines: dict[str, Path]
) -> None:
    code, refused, _ = kvlathe(
        home, "generate", engines["codes"], "--prompt", "x " * 1100
    )
    assert code == 1 and "maximum input length is 1024 tokens" in refused["error"]
