"""A build measures its plan before it writes anything, says what it found wherever the
engine is shown, and refuses what loses too much."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.cli import main as cli
from kvlathe.engines import cache
from kvlathe.engines.build import BuildConfig, build
from kvlathe.engines.job import prepare
from kvlathe.engines.measuring import held_out_of
from kvlathe.engines.order import accept
from kvlathe.engines.pricing import exam_of, sources_of
from kvlathe.export.calibration.calibrate import TOKENS, text_sequences
from kvlathe.measuring import measure as measuring
from kvlathe.plan import manifest as manifests
from kvlathe.plan.measurement import LengthLoss, Measurement
from kvlathe.tasks.held_out import runs

ROOT = Path(__file__).parents[2]
LATHE = ROOT / "models" / "lathe-5m"
EVAL_TEXT = ROOT / "data" / "eval_text.jsonl"
Reference = Callable[[str], tuple[Path, object]]
BROKEN = Measurement(
    (LengthLoss(1024, 2, 2046, 0.75, 0.56, 2.04, 22, 3),), "held-out text", "", "", 1.0
)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLATHE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(reference: Reference) -> Path:
    return reference("llama-dynamic")[0]


def built(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The log of a build by the command line."""
    capsys.readouterr()
    assert cli.run(["build", *map(str, words)]) == 0
    return " ".join(capsys.readouterr().err.split())


def shown(engine: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict, str, str]:
    """The engine as inspect says it, in JSON and in words, and its report."""
    assert cli.run(["inspect", str(engine), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert cli.run(["inspect", str(engine)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    page = html.unescape((engine / "report.html").read_text("utf-8"))
    return facts, words, " ".join(page.split())


@pytest.mark.slow
def test_an_engine_says_everywhere_what_its_plan_loses(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    asked = ("--model", model, "--output-dir", engine, "--compression", "hack:bits=8")
    log = built(capsys, *asked)
    found = manifests.read(engine).measured
    assert found is not None and 0 < found.whole.kl < 0.05 and not found.warning
    assert found.line in log
    facts, words, page = shown(engine, capsys)
    assert facts["measured"]["line"] == found.line
    assert facts["measured"]["whole"]["kl"] == found.whole.kl
    assert facts["warnings"] == {}
    assert f"same token {100 * found.whole.same_token:.1f} %" in words
    assert "Lost beside the uncompressed model" in page and "Warning:" not in page


@pytest.mark.slow
def test_a_plan_that_breaks_the_model_warns_wherever_it_is_shown(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "measure", lambda *_: BROKEN)
    asked = ("--model", model, "--compression", "hack:bits=4", "--output-dir")
    log = built(capsys, *asked, tmp_path / "engine")
    measured = manifests.read(tmp_path / "engine").measured
    assert measured is not None
    warning = measured.warning
    assert "KL 0.75, same token 56.0 %" in warning and "use hack:bits=8" in warning
    assert f"WARNING {warning}" in log
    facts, words, page = shown(tmp_path / "engine", capsys)
    assert facts["warnings"] == {"measured": warning}
    assert "warning: measured" in words and "breaks the model" in words
    assert f"Warning:</b> {warning}" in page

    # The same engine from the cache says it again, and is refused where it must be.
    log = built(capsys, *asked, tmp_path / "again")
    assert "taken from the cache" in log and f"WARNING {warning}" in log
    strict = BuildConfig(model, tmp_path / "strict", "hack:bits=4", max_kl=0.5)
    with pytest.raises(KvlatheError, match=r"loses more than --max-kl 0\.5 allows"):
        build(strict)
    assert not strict.output_dir.exists()
    build(dataclasses.replace(strict, max_kl=0.75))


def test_a_plan_that_loses_more_than_was_allowed_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two bits of a trained model, by the command line."""
    where = ("--model", str(LATHE), "--output-dir", str(tmp_path / "engine"))
    asked = (
        "--compression",
        "hack:bits=2,arithmetic=int",
        "--max-kl",
        "0.05",
        "--no-cache",
    )
    assert cli.run(["build", *where, *asked]) == 1
    said = capsys.readouterr().err
    assert "loses more than --max-kl 0.05 allows" in said and "hack:bits=8" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_engine_that_was_not_measured_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    words = ("--model", model, "--output-dir", engine, "--compression", "fp8")
    assert "INFO not measured" in built(capsys, *words, "--no-measure")
    assert manifests.read(engine).measured is None
    facts, said, page = shown(engine, capsys)
    assert facts["measured"] is None
    assert "measured at build not measured" in said and "not measured" in page

    # It is no answer to a build that measures, which takes its place in the cache.
    built(capsys, *words[:3], tmp_path / "other", *words[4:])
    assert manifests.read(tmp_path / "other").measured is not None
    kept = [one.manifest for one in cache.entries()]
    (measured,) = (one.measured for one in kept if one.compression == "fp8")
    assert measured is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_kl": 0.1, "measure": False}, "Leave out --no-measure"),
        ({"max_kl": -1.0}, "nats a token"),
        ({"max_kl": float("nan")}, "nats a token"),
        ({"measure": None}, "measure=NoneType"),
    ],
)
def test_a_limit_that_cannot_be_measured_is_refused(
    options: dict[str, Any], words: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(KvlatheError, match=words):
        build(BuildConfig(model, tmp_path / "engine", "hack:bits=8", **options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("compression", "options"),
    [
        ("zack", {"calibration": str(EVAL_TEXT)}),
        ("auto", {"compression_ratio": 0.8}),
        ("auto", {"compression_ratio": 0.8, "text": EVAL_TEXT}),
        ("fdc", {"accuracy": 0.99, "metric": "perplexity", "text": EVAL_TEXT}),
        ("zack", {"calibration": str(EVAL_TEXT), "text": EVAL_TEXT}),
    ],
)
def test_no_statistic_and_no_price_has_read_the_text_that_is_measured(
    compression: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Even where the only text that is measured on is given to both."""
    order = accept(BuildConfig(LATHE, tmp_path / "engine", compression, **options))
    checkpoint = prepare(order).checkpoint
    read: list[list[int]] = []
    config = order.config
    if order.compression.calibration == "text":
        pieces = text_sequences(
            checkpoint, Path(str(config.calibration)), TOKENS["text"]
        )
        read += [piece.tolist() for piece in pieces]
    exams = sources_of(config, checkpoint).exams
    if order.searched:
        exams = [exam_of(order, checkpoint)]
        searched = {run for ids in exams[0].windows for run in runs(ids)}
        assert not searched.intersection(run for ids in read for run in runs(ids))
    read += [list(window) for exam in exams for window in exam.windows]
    known = {run for ids in read for run in runs(ids)}
    assert len(known) > 5000
    held_out = held_out_of(order, checkpoint, None)
    windows = [held_out.window(1024) for _ in range(8)] + [held_out.window(4096)]
    assert held_out.described == "held-out text"
    assert not known.intersection(run for ids in windows for run in runs(ids))
