"""The Markdown pages of the repository, and what of a page is prose."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HISTORY = ROOT / "docs" / "history"
"""Pages about the past: their files may be gone, their sentences stay as they were."""

BESIDE = ("benchmarks", "data", "models/lathe-5m")
"""Folders with a page of their own."""

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?:    [^\n]*\n?)+")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"`[^`]*`")
MARKS = re.compile(r"<[^>]*>|[*_#]")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def pages() -> list[Path]:
    """Every page that describes the repository as it is."""
    ours = [
        path for path in (ROOT / "docs").rglob("*.md") if HISTORY not in path.parents
    ]
    others = [ROOT / name / "README.md" for name in BESIDE]
    return sorted([*ours, *ROOT.glob("*.md"), *others])


def name_of(page: Path) -> str:
    """The page's path from the repository's root."""
    return page.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    """The text without its code blocks, fenced or indented."""
    return INDENTED.sub("\n", FENCE.sub("\n", text))


def paragraphs(text: str) -> list[str]:
    """The prose of a page: paragraphs and list items, in plain text.

    Tables, headings and code blocks are left out. A span of code counts as one word.
    """
    blocks: list[str] = []
    for line in without_code(text).splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith(("|", "#")):
            blocks.append("")
        elif re.match(r"[-*] |\d+\. ", stripped) or not blocks:
            blocks.append(re.sub(r"^([-*]|\d+\.) ", "", stripped))
        else:
            blocks[-1] = f"{blocks[-1]} {stripped}".strip()
    return [plain(block) for block in blocks if plain(block)]


def plain(block: str) -> str:
    """A paragraph without Markdown: links as their text, code as the word `code`."""
    text = CODE.sub("code", LINK.sub(r"\1", block))
    return MARKS.sub("", text).strip()


def sentences(text: str) -> list[str]:
    """The sentences of a page."""
    split = [SENTENCE_END.split(block) for block in paragraphs(text)]
    return [sentence for block in split for sentence in block if sentence.strip()]
