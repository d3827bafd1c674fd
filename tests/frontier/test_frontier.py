"""The frontier: the plan to take is the smallest that is allowed, its command builds the
engine that was measured, and what was measured is not measured again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.build import build_command
from kvlathe.cli.main import run
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.order import accept
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.frontier import measure
from kvlathe.frontier.measure import UNCOMPRESSED, Options
from kvlathe.frontier.points import Bound, Candidate, Point, candidate, choose
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.memory import bytes_left
from tests.support.runtime_cases import MODEL, model_shape

SMALL = ("--windows", "1", "--window-tokens", "200", "--questions", "2")
PLAIN = Point("none", "none", None, 512, 8.0, 1.0, 9.0, 1.0, 0.9, 1.0, 0.0)

points = st.builds(
    Point,
    name=st.text("abc", min_size=1, max_size=4),
    compression=st.just("some"),
    ratio=st.none(),
    tokens=st.just(512),
    kv_bytes=st.just(1.0),
    left=st.floats(0.01, 1.2),
    perplexity=st.just(9.0),
    perplexity_ratio=st.floats(0.98, 1.05),
    retrieval=st.sampled_from([0.5, 0.88, 0.89, 0.9, 1.0]),
    agreement=st.just(1.0),
    kl=st.just(0.0),
)


@given(st.lists(points, max_size=8), st.floats(1, 1.05))
def test_the_plan_to_take_is_the_smallest_that_is_allowed(
    others: list[Point], most: float
) -> None:
    bound = Bound(most, PLAIN)
    chosen = choose([PLAIN, *others], bound)
    assert bound.holds(chosen)
    assert chosen.perplexity_ratio is not None and chosen.retrieval is not None
    assert chosen.perplexity_ratio <= most + 1e-6 and chosen.retrieval >= 0.89 - 1e-6
    for other in others:
        assert other.left is not None and other.perplexity_ratio is not None
        fits = other.perplexity_ratio <= most and (other.retrieval or 0) >= 0.89
        assert not fits or (chosen.left or 0) <= other.left


def test_bytes_are_those_of_whole_pages() -> None:
    """Plain attention in 16 bit: what is too much is the empty rest of the last page."""
    form = CacheSettings(16, 64)
    plan, _ = compose(parse("none"), model_shape(), True, None, RankOptions(), form)
    shares = [640 / tokens for tokens in range(576, 640)]
    shares[0] = 1.0  # its pages are full
    expected = sum(shares) / len(shares)
    assert bytes_left(CacheLayout(plan), 640) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_len": 700, "max_seq_len": 1024, "calibration": "random"},
        {"backend": "cuda"},
    ],
)
@pytest.mark.parametrize("asked", ["none", "fdc:removal_rate=0.2", "auto@0.8"])
def test_the_command_builds_the_engine_that_was_measured(
    asked: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """By the key of all that decides an engine's bytes."""
    chosen = candidate(asked)
    of_all = Options(MODEL, tmp_path / "a folder", **options)
    words = shlex.split(of_all.command(chosen))
    assert words[:2] == ["kvlathe", "build"]
    typed = build_command.make_context("build", words[2:]).params
    for unheard in ("word", "no_cache", "dry_run", "as_json", "log_level", "revision"):
        typed.pop(unheard)
    measured = of_all.config(chosen, tmp_path / "elsewhere")
    assert accept(BuildConfig(**typed)).key == accept(measured).key


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_that_was_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two plans in two processes, and one that the model cannot have; then again, and
    again with one point damaged."""
    output = tmp_path / "out"
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))
    asked = "hack:bits=8 hack:bits=4 uncomp:removed=9"
    where = ("--model", str(MODEL), "--output", str(output))
    command = ("frontier", *where, *SMALL, "--compressions", asked)
    assert run([*command, "--jobs", "2"]) == 0
    told = capsys.readouterr().out.splitlines()
    first = json.loads(told[-1])
    assert first == json.loads((output / "frontier.json").read_text())
    none, eight, four, refused = first["points"]
    assert none["perplexity_ratio"] == 1 and none["kl"] == pytest.approx(0, abs=1e-6)
    assert four["left"] < eight["left"] < none["left"] < 1.1
    assert refused["left"] is None and "KV heads" in refused["note"]
    assert first["command"] in told
    assert not list(output.glob("engines-*"))

    built: list[str] = []
    real = measure.Measuring._measured

    def counted(self: measure.Measuring, wanted: Candidate) -> Point:
        built.append(wanted.compression)
        return real(self, wanted)

    monkeypatch.setattr(measure.Measuring, "_measured", counted)
    assert run([*command, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == first and built == ["uncomp:removed=9"]
    kept = {path: json.loads(path.read_text()) for path in output.glob("points/*")}
    for path, point in kept.items():
        if point["compression"] == "hack:bits=4":
            path.write_text("{")
    built.clear()
    assert run([*command, "--json"]) == 0
    last = json.loads(capsys.readouterr().out)
    assert built == ["hack:bits=4", "uncomp:removed=9"]
    assert [row["name"] for row in last["points"]] == [
        row["name"] for row in first["points"]
    ]
    assert last["points"][2]["perplexity"] == pytest.approx(four["perplexity"])
    page = (output / "frontier.html").read_text()
    assert "<svg" in page and first["command"] in page.replace("&#39;", "'")
    assert "src=" not in page and 'href="http' not in page
    assert (output / "frontier.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--compressions", "fcd"), "the compression 'fcd' is unknown.*fdc"),
        (("--compressions", "fdc@half"), "no share of the bytes"),
        (("--compressions", "none@0.5"), "it removes nothing"),
        (("--ratios", "0.5,2"), "is no share"),
        (("--text", "nowhere.jsonl"), "there is no such file"),
        (("--retrieval", "nowhere.jsonl"), "cannot be read"),
    ],
)
def test_a_frontier_that_cannot_be_measured_builds_nothing(
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def built(_: object) -> None:
        raise AssertionError("built")

    monkeypatch.setattr("kvlathe.frontier.run.build", built)
    output = tmp_path / "out"
    where = ("--model", str(MODEL), "--output", str(output))
    assert run(["frontier", *where, *options]) == 1
    with pytest.raises(KvlatheError, match=words):
        raise KvlatheError(capsys.readouterr().err)
    assert not output.exists()


def test_the_uncompressed_candidate_is_spelled_as_its_method() -> None:
    assert candidate("none") == UNCOMPRESSED == Candidate("none", None)
