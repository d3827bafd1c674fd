"""``/v1/prefixes``: a prefix is compacted for one tenant, whose requests then use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.llm import LLM
from tests.support.runtime_cases import llm, text
from tests.support.serving_cases import KEY, Served, post, serving, with_template

OTHER = "sk-other"


def sharing(kind: str) -> LLM:
    engine = with_template(llm("torch", kind))
    engine.engine.scheduler.prefixes = PrefixCache(engine.pool)
    return engine


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(sharing("compacted"), keys=[KEY, OTHER]) as found:
        yield found


def hits(served: Served) -> int:
    found = served.llm.engine.scheduler.prefixes
    assert found is not None
    return found.hits


def answer(served: Served, ids: list[int], key: str = KEY) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": ids, "max_tokens": 4, "temperature": 0}
    return post(served, key=key, **asked).json()["choices"][0]


def test_a_tenants_requests_go_on_from_its_prefix(served: Served) -> None:
    ids = list(text(300))
    plain = answer(served, ids)
    before = served.llm.pool.bytes_in_use
    reply = post(served, "prefixes", prompt=ids[:256], keep=0.5).json()
    assert reply["tokens"] == 256 and reply["kept"] == 0.5
    assert reply["kv_bytes"] * 2 == reply["kv_bytes_whole"]
    assert served.llm.pool.bytes_in_use == before + reply["kv_bytes"]
    seen = hits(served)
    assert answer(served, ids, OTHER) == plain and hits(served) == seen
    answer(served, ids)
    assert hits(served) == seen + 256


def test_a_prefix_compacted_to_all_of_it_changes_no_answer(served: Served) -> None:
    ids = list(text(300, 1000))
    plain = answer(served, ids)
    post(served, "prefixes", prompt=ids[:256], keep=1)
    assert answer(served, ids) == plain


def test_a_conversation_begins_with_the_messages_of_its_prefix(served: Served) -> None:
    words = served.llm.tokenizer.decode(list(text(200, 2000)))
    system = {"role": "system", "content": words}
    reply = post(served, "prefixes", messages=[system]).json()
    seen = hits(served)
    turns = [system, {"role": "user", "content": "Which of these?"}]
    post(served, "chat/completions", messages=turns, max_tokens=1)
    assert reply["tokens"] >= 128 and hits(served) == seen + reply["tokens"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "give one of prompt and messages"),
        ({"prompt": [1] * 70, "messages": [{"role": "user"}]}, "give one of"),
        ({"prompt": [1] * 10}, "blocks of 64"),
        ({"prompt": [1] * 70, "keep": 0}, "greater than 0"),
        ({"prompt": [1] * 70, "tokens": 3}, "Unrecognized request argument"),
    ],
)
def test_refusals_name_what_is_wrong(
    served: Served, body: dict[str, Any], said: str
) -> None:
    reply = post(served, "prefixes", **body)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]


def test_an_engine_without_the_rule_says_so() -> None:
    with serving(sharing("split")) as found:
        reply = post(found, "prefixes", prompt=list(text(100)))
    assert reply.status_code == 400
    assert "keeps prefixes whole" in reply.json()["error"]["message"]
