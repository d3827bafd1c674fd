"""The page at / in a headless Chromium, and what it shows of the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.plan.memory import bytes_left
from kvlathe.runtime.llm import LLM
from kvlathe.server.pages import POLICY
from tests.support.browser import CHROMIUM, WIDTHS, Page, browsing
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


@pytest.mark.slow
def test_a_chat_streams_beside_a_live_cache(paged: Served, page: Page) -> None:
    page.looks(1200, 800)
    page.open(f"{paged.url}/")
    cells = "document.querySelectorAll('#heads span').length"
    page.wait(f"{cells} === {len(paged.llm.plan.lanes)}")
    ask(page, "Say something.")
    page.wait("document.querySelectorAll('.turn.answer').length === 1")
    page.wait("document.getElementById('requests').textContent === '1 running'")
    page.wait("parseInt(document.getElementById('tokens').textContent) > 0")
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


def test_an_idle_page_shows_the_plan_and_what_a_full_cache_holds(
    paged: Served, page: Page
) -> None:
    """The numbers are those of the plan's own layout."""
    engine = paged.llm
    longest = engine.most_tokens
    page.looks(1280, 800)
    page.open(f"{paged.url}/")
    page.wait("document.querySelectorAll('#holds .bar').length > 0")
    gone = 1 - bytes_left(engine.layout, longest) * 16 / engine.plan.index.hot_bits
    assert text_of(page, "removed") == f"{100 * gone:.1f} % less"
    assert f"at {longest:,} tokens" in text_of(page, "length")
    facts = text_of(page, "facts")
    assert engine.plan.compression in facts and f"context{longest:,} tokens" in facts
    assert f"runs at once{engine.limits.max_batch_size} requests" in facts
    # The cache is asked for apart from the plan, and may come later.
    page.wait("document.getElementById('requests').textContent !== ''")
    assert text_of(page, "requests") == "0 running"
    held = engine.pool.arena_bytes // engine.layout.bytes_for(longest)
    rows = page.evaluate(
        "[...document.querySelectorAll('#holds .bar')].map((x) => x.title).join('\\n')"
    )
    assert f"{held:,} sequences of {longest:,} tokens" in rows
    page.evaluate(
        "const box = document.getElementById('curve').getBoundingClientRect();"
        "document.getElementById('curve').dispatchEvent(new PointerEvent('pointermove',"
        "{clientX: box.left + box.width / 2}))"
    )
    assert text_of(page, "at").startswith(f"{longest // 2:,} tokens: ")
    assert not page.errors


LONG = "Look:\n\n```\n" + "x" * 200 + "\n```\n\n" + "y" * 300 + " `" + "z" * 200 + "`"


def test_the_page_is_whole_at_every_width(paged: Served, page: Page) -> None:
    """Idle, with its settings open, during an answer and after it."""
    for width in WIDTHS:
        page.looks(width, 844)
        page.open(f"{paged.url}/")
        page.wait("document.querySelectorAll('#heads span').length > 0")
        assert page.cut() == [], f"idle at {width} pixels"
        shoot(page, f"idle{width}")
        page.evaluate("document.getElementById('opens').click()")
        assert page.cut() == [], f"settings at {width} pixels"
        page.evaluate("document.getElementById('opens').click()")
        ask(page, LONG)
        page.wait("document.querySelectorAll('.turn.answer').length === 1")
        page.evaluate(
            "const body = shown('model', '', 'answer');"
            f"body.append(markdown({json.dumps(LONG)}))"
        )
        assert page.cut() == [], f"answering at {width} pixels"
        page.evaluate("document.getElementById('stop').click()")
        page.wait("!document.getElementById('send').disabled")
        assert page.cut() == [], f"answered at {width} pixels"
    page.open(f"{paged.url}/docs")
    assert page.cut() == [] and page.errors == []


def test_settings_are_sent_with_a_chat(paged: Served, page: Page) -> None:
    page.open(f"{paged.url}/")
    page.wait("document.querySelectorAll('#holds .bar').length > 0")
    page.evaluate(
        "const old = window.fetch; window.sent = [];"
        "window.fetch = (path, said) => { if (said.body) sent.push(said.body);"
        " return old(path, said); };"
        "for (const [id, value] of [['system', 'Be brief.'], ['temperature', '0'],"
        " ['most', '7'], ['stops', 'END\\nSTOP']])"
        " document.getElementById(id).value = value;"
    )
    ask(page, "Count.")
    page.wait("/^7 tokens/.test(document.getElementById('speed').textContent)")
    body = json.loads(page.evaluate("sent[0]"))
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count."},
    ]
    assert (body["temperature"], body["max_tokens"]) == (0, 7)
    assert body["stop"] == ["END", "STOP"]


MARKDOWN = """# Title
Some **bold**, *slanted* and `code`, [a link](https://example.org/a) and
[no link](javascript:alert(1)).

```python
def f(x):
    return "<b>"
```
- one
- two
  1. inner

| a | b |
|---|---|
| 1 | <script>alert(1)</script> |

> said <img src=x onerror=alert(1)>
"""


def streamed(*choices: Mapping[str, object]) -> str:
    """A script after which the page's requests for answers get these events."""
    chunks = [json.dumps({"choices": [choice]}) for choice in choices]
    body = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
    return (
        "window.sent = []; window.real = window.real || window.fetch;"
        "window.fetch = (path, said) => said.body ? (sent.push(JSON.parse(said.body)),"
        f" Promise.resolve(new Response({json.dumps(body)}))) : real(path, said);"
    )


def test_an_answer_shows_its_thoughts_that_it_was_cut_and_another_may_be_asked_for(
    paged: Served, page: Page
) -> None:
    for width in WIDTHS:
        page.looks(width, 844)
        page.open(f"{paged.url}/")
        page.wait("document.querySelectorAll('#holds .bar').length > 0")
        cut = {"delta": {"content": "It is"}, "finish_reason": "length"}
        page.evaluate(streamed({"delta": {"reasoning_content": "Hm."}}, cut))
        ask(page, "What?")
        page.wait("document.querySelector('.again') !== null")
        assert (
            page.evaluate("document.querySelector('.thoughts div').textContent")
            == "Hm."
        )
        log = "document.getElementById('log').textContent"
        assert "It is" in page.evaluate(log) and "was cut" in page.evaluate(log)
        page.evaluate("document.querySelector('.thoughts').open = true")
        assert page.cut() == []
        shoot(page, f"thoughts-{width}")
        page.evaluate(streamed({"delta": {"content": "Another."}}))
        page.evaluate("document.querySelector('.again').click()")
        page.wait(f"/Another/.test({log}) && document.querySelector('.again') !== null")
        found = page.evaluate(log)
        assert "It is" not in found and "was cut" not in found and "Hm." not in found
        assert (
            page.evaluate("sent[0].messages.map((one) => one.content).join()")
            == "What?"
        )
        ask(page, "And?")
        page.wait("document.querySelectorAll('.turn.answer').length === 2")
        said = page.evaluate("sent[1].messages.map((one) => one.content).join()")
        assert said == "What?,Another.,And?"


def test_a_long_answer_is_followed_at_every_width(paged: Served, page: Page) -> None:
    for width in WIDTHS:
        page.looks(width, 600)
        page.open(f"{paged.url}/")
        page.wait("document.querySelectorAll('#holds .bar').length > 0")
        lines = "\n\n".join(f"Line {number}." for number in range(40))
        page.evaluate(streamed({"delta": {"content": lines}}))
        ask(page, "Much?")
        page.wait("document.querySelector('.again') !== null")
        last = "document.querySelector('.again').getBoundingClientRect().bottom"
        top = "document.querySelector('.foot').getBoundingClientRect().top"
        assert page.evaluate(f"{last} > 0 && {last} <= {top} + 1"), width


def test_a_question_to_a_server_that_is_gone_comes_back(
    paged: Served, page: Page
) -> None:
    page.open(f"{paged.url}/")
    page.wait("document.querySelectorAll('#holds .bar').length > 0")
    page.evaluate(
        "window.real = window.fetch;"
        "window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))"
    )
    ask(page, "Still there?")
    page.wait("document.querySelector('.failed') !== null")
    assert "the server does not answer" in text_of(page, "log")
    assert page.evaluate("document.getElementById('text').value") == "Still there?"
    page.wait("/does not answer/.test(document.getElementById('requests').textContent)")
    page.evaluate("window.fetch = window.real")
    page.evaluate("document.getElementById('ask').requestSubmit()")
    page.wait("/ running/.test(document.getElementById('requests').textContent)")
    page.wait("document.querySelectorAll('.turn.answer').length === 1")
    page.evaluate("document.getElementById('stop').click()")
    page.wait("document.querySelector('.again') !== null")
    assert page.errors == []


def test_markdown_becomes_elements_and_never_markup(paged: Served, page: Page) -> None:
    page.open(f"{paged.url}/")
    page.evaluate(
        "const box = document.createElement('div'); box.id = 'made';"
        f"box.append(markdown({json.dumps(MARKDOWN)})); document.body.append(box)"
    )

    def found(selector: str) -> list[str]:
        script = f"[...document.querySelectorAll('#made {selector}')]"
        return json.loads(
            page.evaluate(f"JSON.stringify({script}.map((x) => x.textContent))")
        )

    assert found("h3") == ["Title"] and found("strong") == ["bold"]
    assert found("em") == ["slanted"] and found("p code") == ["code"]
    assert found("pre code") == ['def f(x):\n    return "<b>"']
    assert found("ul > li")[0] == "one" and found("ol > li") == ["inner"]
    assert found("th") == ["a", "b"]
    assert found("td") == ["1", "<script>alert(1)</script>"]
    assert found("a") == ["a link"]
    assert "[no link](javascript:alert(1))" in "".join(found("p"))
    assert found("blockquote") == ["said <img src=x onerror=alert(1)>"]
    assert not found("img") and not found("script") and not page.errors


TEXTS = st.text(st.sampled_from("ab *_`#>-|[]()<1.\n~&\"'"), max_size=60)
RENDERED = """JSON.stringify(TEXTS.map((text) => {
  const box = document.createElement('div');
  box.append(markdown(text));
  const runs = 'script,img,iframe,object,link,style,form,[onerror],[onclick]';
  return [box.textContent, box.querySelectorAll(runs).length];
}))"""


def letters(text: str) -> str:
    return "".join(letter for letter in text if letter in "ab")


def test_any_text_is_rendered_whole_and_nothing_runs(paged: Served, page: Page) -> None:
    """Letters stay in their order. Only a fence's language and a link's target are not
    part of the text."""
    page.open(f"{paged.url}/")

    @given(st.lists(TEXTS, min_size=40, max_size=60))
    @settings(max_examples=5, deadline=None)
    def law(texts: list[str]) -> None:
        script = RENDERED.replace("TEXTS", json.dumps(texts))
        made = json.loads(page.evaluate(script))
        for text, (seen, running) in zip(texts, made, strict=True):
            assert not running, text
            if not set("`~(") & set(text):
                assert letters(seen) == letters(text), text

    law()


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
    for path in ("cache", "plan"):
        assert httpx.get(f"{served.url}/v1/{path}").status_code == 401
