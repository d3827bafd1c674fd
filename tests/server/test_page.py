"""The page at / in a headless Chromium, and what it shows of the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from kvlathe.runtime.llm import LLM
from kvlathe.server.pages import POLICY
from tests.support.browser import CHROMIUM, Page, browsing
from tests.support.runtime_cases import built_folder, llm
from tests.support.serving_cases import KEY, Served, serving, with_template

SHOTS = os.environ.get("KVLATHE_SCREENSHOTS")
"""A folder to keep pictures of the page in."""


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = built_folder(tmp_path_factory.mktemp("engine"), "sealed")
    engine = LLM.load(folder, 1 << 27, share_prefixes=True, verify=False)
    engine.engine.stop_ids = frozenset()  # answers go on until they are stopped
    with serving(with_template(engine)) as found:
        yield found


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with browsing(tmp_path / "profile") as found:
        yield found


def text_of(page: Page, name: str) -> str:
    return page.evaluate(f"document.getElementById('{name}').textContent")


def ask(page: Page, text: str) -> None:
    script = f"document.getElementById('text').value = {text!r};"
    page.evaluate(script + "document.getElementById('ask').requestSubmit()")


def shoot(page: Page, name: str) -> None:
    if SHOTS:
        page.screenshot(Path(SHOTS) / f"{name}.png")


def test_bytes_by_head_add_up_to_the_pool(paged: Served) -> None:
    """While an answer runs: heads, tokens, and what they would take uncompressed."""
    served, engine = paged, paged.llm
    with httpx.stream(
        "POST",
        f"{served.url}/v1/completions",
        json={
            "model": "lathe-5m",
            "prompt": "def main():\n" * 60,
            "max_tokens": 400,
            "stream": True,
            "ignore_eos": True,
        },
        timeout=60,
    ) as stream:
        events = stream.iter_lines()
        next(events)
        view = httpx.get(f"{served.url}/v1/cache").json()
    heads = view["heads"]
    assert len(heads) == len(engine.plan.lanes)
    now = sum(head["now"] for head in heads)
    assert now <= view["running_bytes"] + view["kept_bytes"] <= view["total_bytes"]
    assert view["running"] == 1 and view["running_tokens"] > 100
    assert view["running_uncompressed"] > 0
    steady = sum(head["per_token"] for head in heads)
    assert 0 < steady <= engine.layout.bytes_per_token() + 1e-9
    assert served.idle() or view["kept_bytes"] >= 0


def test_a_chat_streams_beside_a_live_cache(paged: Served, page: Page) -> None:
    page.looks(1200, 800)
    page.open(f"{paged.url}/")
    cells = "document.querySelectorAll('#heads span').length"
    page.wait(f"{cells} === {len(paged.llm.plan.lanes)}")
    ask(page, "Say something.")
    page.wait("document.querySelectorAll('.turn.answer').length === 1")
    page.wait(
        "/tokens of 1 answer$/.test(document.getElementById('running').textContent)"
    )
    shoot(page, "answering")
    page.evaluate("document.getElementById('stop').click()")
    page.wait("!document.getElementById('send').disabled")
    ask(page, "<img src=x onerror=alert(1)> & more")
    page.wait("document.querySelectorAll('.turn.user').length === 2")
    page.wait("document.querySelectorAll('.turn.answer').length === 2")
    assert page.evaluate("document.querySelectorAll('#log img').length") == 0
    page.evaluate("document.getElementById('stop').click()")
    page.wait("!document.getElementById('send').disabled")
    shoot(page, "light")
    page.looks(1200, 800, dark=True)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    shoot(page, "dark")
    page.looks(360, 740)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    wide = "document.documentElement.scrollWidth"
    assert dark != light and page.evaluate(wide) <= 360
    shoot(page, "phone")
    page.evaluate("document.getElementById('anew').click()")
    assert text_of(page, "log") == ""
    origins = {url.split("/", 3)[2] for url in page.asked if url.startswith("http")}
    assert origins == {paged.url.split("/")[2]}, "nothing comes from elsewhere"
    assert not page.errors


def test_a_model_without_a_template_continues_texts(page: Page) -> None:
    with serving(llm("torch", "split")) as served:
        page.open(f"{served.url}/")
        page.wait("document.querySelectorAll('#heads span').length > 0")
        ask(page, "def main():")
        page.wait("/no chat template/.test(document.getElementById('log').textContent)")
        page.wait("/ tokens\\/s/.test(document.getElementById('speed').textContent)")
        assert not page.errors


def test_a_server_with_keys_asks_for_one(served: Served, page: Page) -> None:
    page.open(f"{served.url}/")
    page.wait("!document.getElementById('keyform').hidden")
    page.evaluate(
        f"document.getElementById('key').value = '{KEY}';"
        "document.getElementById('keyform').requestSubmit()"
    )
    page.wait("document.querySelectorAll('#heads span').length > 0")


def test_the_page_needs_nothing_else_and_says_so(served: Served) -> None:
    found = httpx.get(f"{served.url}/")
    assert found.status_code == 200 and found.headers["content-type"].startswith(
        "text/html"
    )
    assert found.headers["content-security-policy"] == POLICY
    assert "http://" not in found.text and "https://" not in found.text
    assert httpx.get(f"{served.url}/v1/cache").status_code == 401
