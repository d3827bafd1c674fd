"""Pages say what is so. What was asked for, tried and not reached is history."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name_of, pages

MOST_LINES = 200
"""Lines of docs/performance.md: its tables are read, not its story."""

ASKED = re.compile(
    r"\bmissed\b|\bnot reached\b|\bwanted(?: was| were|:)|\(targets? \d"
    r"|\bby elimination\b|\bthis time\b|\b20\d\d-\d\d-\d\d\b",
    re.IGNORECASE,
)
"""Words of a diary: targets of ours, what became of them, and days of runs."""

DIARIES = ("CHANGELOG.md",)


@pytest.mark.parametrize(
    "page", [page for page in pages() if page.name not in DIARIES], ids=name_of
)
def test_pages_hold_results_and_no_targets_of_ours(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if ASKED.search(line)]


def test_results_of_the_kernels_fit_two_hundred_lines() -> None:
    page = ROOT / "docs" / "performance.md"
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_words_of_a_diary_are_found_and_others_are_not() -> None:
    assert ASKED.search("| 8 bit | 2.1x (target 2.5x) | missed |")
    assert ASKED.search("Wanted were 240 s.") and ASKED.search("On 2026-11-21 it ran")
    assert not ASKED.search("the line at the wanted depth, `--target-len 3072`")
