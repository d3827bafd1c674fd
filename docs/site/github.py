"""A hook of mkdocs: pages are read as GitHub reads them, and links say titles.

GitHub and Python-Markdown, which renders the site, differ in four places that pages
need. On GitHub a list or a table may follow a paragraph without an empty line, a code
span in a table writes ``|`` as ``\\|``, and a code fence may name more than its
language.

In the repository a link is named after its file. On the site it has the page's title.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"(```+|~~~+)(\w*)(.*)")
ITEM = re.compile(r"[-*+] |1[.)] ")
"""Starts a list, also right after a paragraph."""
DELIMITERS = re.compile(r"\|?[ :|-]*-[ :|-]*\|[ :|-]*")
"""The line between a table's head and its rows."""
CODE = re.compile(r"(`+)(.+?)\1")
NAMED = re.compile(r"\[[\w/.-]+\.md\]\(([\w/.-]+\.md)((?:#[\w-]+)?)\)")
"""A link to a page, or a part of it, that is named after a file."""
SHORT = re.compile(r":\s|, and ")
"""What follows in a title says it again, at length."""


def as_python_markdown(page: str) -> str:
    """The page's Markdown in words that Python-Markdown reads as GitHub reads
    ``page``."""
    return "\n".join(_lines(page.split("\n")))


def titled(page: str, folder: Path) -> str:
    """The Markdown of a page in ``folder``, with titles of pages for names of files."""

    def link(found: re.Match[str]) -> str:
        target = folder / found[1]
        if not target.is_file():
            return found[0]  # mkdocs says what is wrong with it
        heading = target.read_text(encoding="utf-8").partition("\n")[0]
        return f"[{SHORT.split(heading.lstrip('# '))[0]}]({found[1]}{found[2]})"

    return NAMED.sub(link, page)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Called by mkdocs before it renders a page."""
    folder = (DOCS / page.file.src_uri).parent
    return as_python_markdown(titled(markdown, folder))


def _lines(lines: list[str]) -> Iterator[str]:
    fence, block = "", ""
    for number, line in enumerate(lines):
        opened = FENCE.match(line.lstrip())
        if fence:
            fence = "" if line.strip() == fence else fence
        elif opened:
            fence, language, _ = opened.groups()
            line = f"{line[: len(line) - len(line.lstrip())]}{fence}{language}"
        else:
            begun = _block(line, lines[number + 1 :], block)
            if begun != block and block == "text" and begun in ("list", "table"):
                yield ""
            block = begun
            if block == "table":
                line = CODE.sub(lambda span: span[0].replace("\\|", "|"), line)
        yield line


def _block(line: str, later: list[str], before: str) -> str:
    """The kind of block that a line is in: text, list, table, or none where it is
    empty. ``before``: that of the line before."""
    if not line.strip():
        return ""
    if before == "table" and "|" in line:
        return "table"
    if later and "|" in line and DELIMITERS.fullmatch(later[0].strip()):
        return "table"
    if before == "list" or ITEM.match(line):
        return "list"
    return "code" if line.startswith("    ") and before != "text" else "text"
