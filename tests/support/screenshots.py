"""The pictures of pages in docs: ``python -m tests.support.screenshots [--engine ENGINE]
[--chat ENGINE] [--site FOLDER] [--page NAME FILE]...``.

--engine is a built engine, whose report is pictured, and which a server of this process
serves unless --chat names another one. --page is a file of HTML, --site what
scripts/docs.sh built. Each page is seen at both widths (``WIDTHS``): docs/NAME.png and
docs/NAME_phone.png.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Generator
from pathlib import Path

from PIL import Image

from kvlathe.runtime.llm import LLM
from tests.support.browser import WIDTHS, Page, browsing
from tests.support.serving_cases import serving, with_template
from tests.test_architecture import ROOT

DOCS = ROOT / "docs"
MOST_BYTES = 200_000
HEIGHTS = {WIDTHS[0]: 900, WIDTHS[1]: 844}
SUFFIXES = {WIDTHS[0]: "", WIDTHS[1]: "_phone"}
COLOURS = 256
QUESTION = "# How to install\n\nRun this command:"
TOKENS = "160"


def keep(page: Page, name: str) -> None:
    """Write what the page shows, in few colours."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        page.screenshot(shot)
        picture = Image.open(io.BytesIO(shot.read_bytes())).convert("RGB")
    target = DOCS / f"{name}.png"
    picture.quantize(COLOURS).save(target, optimize=True)
    assert target.stat().st_size < MOST_BYTES, target


def picture_file(page: Page, file: Path, name: str, own: bool = True) -> None:
    """A page of a file, at both widths. ``own``: one of ours, of which nothing may be
    cut."""
    for width, height in HEIGHTS.items():
        page.looks(width, height)
        page.open(file.resolve().as_uri())
        assert not own or not page.cut()
        keep(page, name + SUFFIXES[width])


def picture_chat(page: Page, url: str) -> None:
    """Idle, and with an answer that runs."""
    for width, height in HEIGHTS.items():
        page.looks(width, height)
        page.open(url)
        page.wait("document.querySelectorAll('#heads span').length > 0")
        keep(page, f"chat_idle{SUFFIXES[width]}")
        page.evaluate(
            f"document.getElementById('most').value = {TOKENS};"
            "document.getElementById('temperature').value = 0;"
            f"document.getElementById('text').value = {QUESTION!r};"
            "document.getElementById('ask').requestSubmit()"
        )
        page.wait("document.querySelector('.answer .body')?.textContent.length > 200")
        page.wait("parseInt(document.getElementById('tokens').textContent) > 0")
        page.evaluate("scrollTo(0, 0)")
        keep(page, f"chat_page{SUFFIXES[width]}")
        page.evaluate("document.getElementById('stop').click()")
        page.wait("!document.getElementById('send').disabled")
        assert not page.cut() and not page.errors


@contextlib.contextmanager
def served(engine: Path) -> Generator[str]:
    """The address of a server of an engine."""
    llm = LLM.load(engine, 1 << 30, verify=False)
    if llm.tokenizer.chat_template is None:
        with_template(llm)
    name = llm.manifest.model if llm.manifest else engine.name
    with serving(llm, name=name) as found:
        yield f"{found.url}/"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--chat", type=Path, help="serve this one")
    parser.add_argument("--site", type=Path)
    names = ("NAME", "FILE")
    parser.add_argument("--page", nargs=2, action="append", default=[], metavar=names)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        browsing(Path(folder) / "profile") as page,
    ):
        for name, file in asked.page:
            picture_file(page, Path(file), name)
        if asked.site:  # its theme has a menu beside the window, and tables scroll
            picture_file(page, asked.site / "index.html", "site", own=False)
        if asked.engine:
            picture_file(page, asked.engine / "report.html", "report")
        if asked.chat or asked.engine:
            with served(asked.chat or asked.engine) as url:
                picture_chat(page, url)


if __name__ == "__main__":
    main()
