"""Every page that kvlathe writes, in a headless Chromium as wide as a desk's screen and as
a phone: nothing is cut, and the console shows no error. The server's own page is in
tests/server/test_page.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlathe.evaluation import suite_page
from kvlathe.export.report.report import render
from kvlathe.frontier import page as frontier_page
from kvlathe.frontier.points import Bound, Point
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.memory import memory_table
from tests.export.report.test_report import LOSS, make_data, make_plan, sealed_plan
from tests.support.browser import CHROMIUM, WIDTHS, Page, browsing


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


def look(page: Page, path: Path) -> None:
    """The law, of one page."""
    for width in WIDTHS:
        page.looks(width, 900)
        page.open(path.as_uri())
        assert page.cut() == [], f"at {width} pixels"
    assert page.errors == []


CURVE = {
    "metric": "retrieval",
    "measured_on": "50 questions",
    "baseline": 0.98,
    "target": 0.97,
    "of": "auto",
    "points": [
        {
            "of": of,
            "plan": f"{of}:size={i}",
            "removed": 1 - 0.5**i,
            "score": 1 - 0.01 * i,
        }
        for of in ("auto", "hack", "turboquant", "fdc+hack:bits=4")
        for i in (1, 2, 3)
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["searched", "sealed"])
def test_a_report_is_whole_at_every_width(
    kind: str, page: Page, tmp_path: Path
) -> None:
    budget = sealed_plan(1024)
    plan = budget if kind == "sealed" else make_plan(notes={"curve": CURVE})
    command = "kvlathe build --model " + "models/a-folder-with-a-long-name/" * 8
    data = dataclasses.replace(
        make_data(plan),
        command=command,
        loss=LOSS,
        longest=4096,
        memory=memory_table(CacheLayout(plan), 4096, 8, 1 << 30),
        model="an-organisation/a-model-with-a-long-name-instruct-v0.3",
    )
    (tmp_path / "report.html").write_text(render(data), "utf-8")
    look(page, tmp_path / "report.html")


def points() -> list[Point]:
    names = ("none", "hack:bits=4", "duo:share=0.25+hack:bits=4", "snapkv:budget=512")
    found = []
    for i, name in enumerate(names):
        numbers = (
            4096,
            1e6 / (i + 1),
            1 / (i + 1),
            9.0,
            1 + 0.02 * i,
            0.98,
            0.97,
            0.01,
        )
        found.append(Point(name, name, None, *numbers))
    for ratio in (0.8, 0.9, 0.95):
        numbers = (4096, 1e5, 1 - ratio, 9.0, 1.004, 0.98, 0.97, 0.01)
        found.append(Point(f"auto at {ratio}", "auto", ratio, *numbers))
    refused = "fdc:removal_rate=0.15"
    return [*found, Point(refused, refused, None, note="It cannot be had. Leave it.")]


def test_a_frontier_is_whole_at_every_width(page: Page, tmp_path: Path) -> None:
    found = points()
    result = {
        "model": "smollm2-135m-instruct",
        "bound": 1.01,
        "command": "kvlathe build --model " + "models/a-folder-with-a-long-name/" * 8,
        "measured_on": {
            "text": "8 windows of 2,048 tokens",
            "retrieval": "50 questions",
        },
        "page": tmp_path / "frontier.html",
        "plot": tmp_path / "frontier.png",
    }
    frontier_page.write(result, found, Bound(1.01, found[0]), found[-3])
    look(page, tmp_path / "frontier.html")


def test_an_examination_is_whole_at_every_width(page: Page, tmp_path: Path) -> None:
    lengths = [256, 512, 1024, 2048, 3072, 3584]
    heat = [[i / 6 for i in range(len(lengths))] for _ in range(5)]
    score = {"engine": 0.9786, "baseline": 0.9812, "ratio": 0.9973}
    result = {
        "engine": {
            "model": "smollm2-135m-instruct",
            "compression": "duo:share=0.25+hack:bits=4",
            "backend": "onnxruntime",
        },
        "baseline": {"compression": "none"},
        "bytes": {
            "tokens": 3000,
            "kv_bytes": 123456,
            "hot_bits": 32,
            "kv_bytes_removed_16bit": 0.8,
            "kv_bytes_uncompressed_16bit": 654321,
            "kv_bytes_removed_hot_format": 0.9,
        },
        "scores": [
            {"task": "text", "metric": "agreement with the baseline", **score},
            {"task": "code completion", "metric": "edit similarity", **score},
        ],
        "heat_map": {
            "lengths": lengths,
            "depths": [0, 0.25, 0.5, 0.75, 1],
            "engine": heat,
            "baseline": heat,
        },
        "measured_on": {
            "windows": 8,
            "window_tokens": 512,
            "questions": 60,
            "code_lines": 24,
            "passages": 24,
            "repeats": 2,
            "file": "eval_text_of_a_long_name.jsonl",
        },
    }
    suite_page.write_page(result, tmp_path / "suite.html")
    look(page, tmp_path / "suite.html")


BROKEN = """<meta name=viewport content="width=device-width">
<body style="margin:0"><div style="width:2000px">too wide</div>
<div style="width:50px;overflow:auto"><p style="width:90px">hidden</p></div>
<svg viewBox="0 0 10 10" width=50 height=50><text x=9 y=5 font-size=4>left</text></svg>
<script>console.error("said")</script>"""


def test_a_page_that_is_cut_is_seen(page: Page, tmp_path: Path) -> None:
    (tmp_path / "broken.html").write_text(BROKEN)
    page.looks(1280, 900)
    page.open((tmp_path / "broken.html").as_uri())
    found = " ".join(page.cut())
    assert all(word in found for word in ("the page", "too wide", "hidden", "left"))
    assert any("said" in error for error in page.errors)
    page.errors.clear()
