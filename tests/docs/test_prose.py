"""Pages are written in short sentences: a mean of words and commas that no page exceeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import name_of, pages, sentences

WORDS = 16.0
COMMAS = 1.0
"""A sentence, as the mean of a page."""

PROSE = [page for page in pages() if page.name != "CHANGELOG.md"]
"""A changelog is a list of names."""


def means(text: str) -> tuple[float, float]:
    """(words, commas) of a page's sentences."""
    lines = sentences(text)
    words = sum(len(line.split()) for line in lines)
    commas = sum(line.count(",") for line in lines)
    return words / max(1, len(lines)), commas / max(1, len(lines))


@pytest.mark.parametrize("page", PROSE, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    words, commas = means(page.read_text(encoding="utf-8"))
    assert words <= WORDS and commas <= COMMAS


def test_code_tables_and_headings_are_no_prose() -> None:
    page = (
        "# Title of it\nOne two, three. Four `a b c`.\n\n| a | b |\n\n    code here\n"
    )
    assert sentences(page) == ["One two, three.", "Four code."]
