"""What a reader of the site would see of Markdown that was not rendered."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from html.parser import HTMLParser
from types import ModuleType

import markdown
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig

from tests.docs.pages import ROOT

VOID = {"br", "col", "hr", "img", "input", "link", "meta"}
"""Elements without an end."""
UNSEEN = {"script", "style", "title", "pre", "svg"}
"""Elements whose text is code, or nobody's to read."""
MARKUP = re.compile(
    r"\n[-*+] |\n\d+[.)] |\*\*|`|\]\(|(?:^|\n)#{1,6} |~~~|\\[*_|]|\n\||\|[ :]*-{3,}"
)
"""Lists, emphasis, code, links, headings, fences, escapes and tables in running text."""


class Seen(HTMLParser):
    """``found``: (element, text) of every text that holds raw Markdown."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if UNSEEN & set(self._open):
            return
        in_code = "code" in self._open
        if "\\|" in data if in_code else MARKUP.search(data):
            self.found.append((self._open[-1] if self._open else "", data.strip()))


def raw_markup(html: str) -> list[tuple[str, str]]:
    """(element, text) of the Markdown that rendering left in a page's text."""
    seen = Seen()
    seen.feed(html)
    seen.close()
    return seen.found


@cache
def configured() -> MkDocsConfig:
    """mkdocs.yml, with the extensions of Markdown that mkdocs adds."""
    return load_config(str(ROOT / "mkdocs.yml"))


def hook(name: str) -> ModuleType:
    """A module of docs/site, as mkdocs loads it."""
    path = ROOT / "docs" / "site" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render(page: str, config: MkDocsConfig) -> str:
    """The HTML of a page, as the site has it, links aside."""
    reader = markdown.Markdown(
        extensions=config.markdown_extensions, extension_configs=config.mdx_configs
    )
    return reader.convert(hook("github").as_python_markdown(page))
