"""The site builds without a warning, holds the API reference, and shows no Markdown
that was not rendered."""

from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name_of
from tests.support.browser import CHROMIUM, browsing

MISSING = [
    name for name in ("mkdocs", "material", "mkdocstrings") if not util.find_spec(name)
]
needs_mkdocs = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} missing: pip install '.[docs]'"
)
PAGES = sorted((ROOT / "docs").rglob("*.md"))
"""Every page of the site, those of the past too."""


@needs_mkdocs
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_raw_markup_is_left_in_a_rendered_page(page: Path) -> None:
    from tests.docs.rendered import configured, raw_markup, render

    assert not raw_markup(render(page.read_text(encoding="utf-8"), configured()))


UNLIKE = [
    ("Two kinds:\n- one\n- two\n\nThe end.", "<li>two</li>"),
    ("Steps:\n1. one\n2. two", "<ol>"),
    ("Said:\n| a | b |\n|---|---|\n| 1 | 2 |", "<td>2</td>"),
    ("| a | b |\n|---|---|\n| `x=1\\|2` | 3 |", "<code>x=1|2</code>"),
    ("```python file=a.py\nx = 1\n```", "<pre>"),
]
"""Markdown that Python-Markdown reads unlike GitHub, and HTML that both should make."""


@needs_mkdocs
@pytest.mark.parametrize(("page", "html"), UNLIKE)
def test_lists_tables_and_fences_are_read_as_github_reads_them(
    page: str, html: str
) -> None:
    import markdown

    from tests.docs.rendered import configured, raw_markup, render

    assert html in render(page, configured())
    alone = markdown.markdown(page, extensions=["tables", "fenced_code"])
    assert html not in alone
    assert "file=" in alone or raw_markup(alone)


@needs_mkdocs
def test_code_is_not_read_as_lists_or_tables() -> None:
    from tests.docs.rendered import hook

    same = hook("github").as_python_markdown
    for code in (
        "```\nwords\n- one\n| a |\n|---|\n```",
        "words\n\n    x\n    - one\n    | a | b |\n    |---|---|\n",
        "- one\n  goes on\n- two\n  - inner",
    ):
        assert same(code) == code


@needs_mkdocs
def test_links_to_pages_say_titles() -> None:
    from tests.docs.rendered import hook

    page = "See [auto.md](auto.md#x), [that](auto.md) and [extending/gone.md](gone.md)."
    assert hook("github").titled(page, ROOT / "docs") == page.replace(
        "[auto.md](auto.md#x)", "[auto](auto.md#x)"
    )


@needs_mkdocs
def test_examples_of_docstrings_are_code_and_shapes_no_links() -> None:
    from tests.docs.rendered import hook

    lines = hook("shapes").as_markdown(
        "Rows [token][rank].\n\n>>> f(1)\n[('a', 1), ('b', 2)]\n\nMore.\n>>> g()"
    )
    assert list(lines) == [
        *("Rows [token]\\[rank].", "", "```pycon", ">>> f(1)"),
        *("[('a', 1), ('b', 2)]", "```", "", "More.", "```pycon", ">>> g()", "```"),
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    done = subprocess.run(
        [*command, str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.nightly
@needs_mkdocs
@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")
def test_pages_of_the_site_fit_a_screen_and_a_phone(site: Path, tmp_path: Path) -> None:
    with browsing(tmp_path) as page:
        for name in ("index", "recipes", "migrating", "methods", "cli"):
            for width in (1280, 390):
                page.looks(width, 900)
                page.open((site / f"{name}.html").as_uri())
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, (name, width)
        assert not page.errors


@pytest.mark.nightly
@needs_mkdocs
def test_the_site_holds_the_reference_and_no_raw_markup(site: Path) -> None:
    from tests.docs.rendered import raw_markup

    reference = (site / "api" / "plan.html").read_text(encoding="utf-8")
    assert 'id="kvlathe.plan.plan.CompressionPlan"' in reference
    pages = [page for page in site.rglob("*.html") if page.parent.name != "api"]
    raw = {page: raw_markup(page.read_text(encoding="utf-8")) for page in pages}
    assert len(pages) > len(PAGES) / 2 and not any(raw.values()), raw
