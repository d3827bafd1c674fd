"""The glossary is short, and gives each word one meaning."""

from __future__ import annotations

from collections import Counter

from tests.test_architecture import ROOT

FEWER_THAN = 60
ONE_MEANING = {"rank", "share", "form", "request", "part", "sampling", "observer"}
"""Words that had several."""


def entries(page: str) -> list[list[str]]:
    """Cells of the rows of a page's tables, heads aside."""
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [row for row in cells if row[0] != "word"]


def words(rows: list[list[str]]) -> list[str]:
    """Every word that has an entry, those of a list of words too."""
    return [word.strip().lower() for row in rows for word in row[0].split(",")]


def doubled(page: str) -> list[str]:
    counts = Counter(words(entries(page)))
    return [word for word, count in counts.items() if count > 1]


def glossary() -> str:
    return (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def test_the_glossary_has_few_entries_of_three_cells() -> None:
    rows = entries(glossary())
    assert len(rows) < FEWER_THAN
    assert all(len(row) == 3 and row[0] and row[1] for row in rows)


def test_no_word_stands_twice() -> None:
    assert not doubled(glossary())
    assert doubled("| word | meaning | e |\n| a, B | x | |\n| b | y | |") == ["b"]


def test_words_that_had_several_meanings_have_one() -> None:
    assert set(words(entries(glossary()))) >= ONE_MEANING
