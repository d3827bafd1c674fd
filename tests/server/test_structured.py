"""Structured answers over HTTP, as the official client asks for them."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from kvlathe.runtime.text.structure import Structure
from tests.support.serving_cases import (
    KEY,
    MODEL_NAME,
    PROMPT,
    Served,
    post,
    raw_request,
)

pytest.importorskip("llguidance", reason="llguidance is not installed")
pytestmark = pytest.mark.usefixtures("nothing_is_left")
USER: list[Any] = [{"role": "user", "content": "Who?"}]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=150)
    kind: Literal["a", "b"]


SCHEMA = Person.model_json_schema()
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
}


def test_the_official_client_parses_a_pydantic_model(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(
        model=MODEL_NAME,
        messages=USER,
        response_format=Person,
        seed=1,
        n=3,
        max_tokens=300,
    )
    for choice in found.choices:
        assert isinstance(choice.message.parsed, Person)
        assert choice.finish_reason == "stop"


def test_a_stream_adds_up_to_json(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL_NAME,
        messages=USER,
        response_format=FORMAT,
        stream=True,
        logprobs=True,
        temperature=0.7,
        presence_penalty=0.5,
        seed=4,
    )
    pieces, ends = list[str](), list[str]()
    for chunk in chunks:
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            ends += [choice.finish_reason] if choice.finish_reason else []
    jsonschema.validate(json.loads("".join(pieces)), SCHEMA)
    assert ends == ["stop"] and len(pieces) > 5


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"structured_outputs": {"regex": "[a-c]{3}!"}}, "[a-c]{3}!"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no (1)"]}}, r"yes|no \(1\)"),
    "json": ({"structured_outputs": {"json": {"enum": [1, "x"]}}}, '1|"x"'),
    "json text": ({"structured_outputs": {"json": '{"const": null}'}}, "null"),
    "grammar": ({"structured_outputs": {"grammar": 'start: ("a" "b")~3'}}, "(ab){3}"),
    "format": ({"response_format": FORMAT}, r"(?s)\{.*\}"),
    "guided json": ({"guided_json": {"enum": [1, "x"]}}, '1|"x"'),
    "guided regex": ({"guided_regex": "[a-c]{3}!"}, "[a-c]{3}!"),
    "guided choice": ({"guided_choice": ["yes", "no (1)"]}, r"yes|no \(1\)"),
    "guided grammar": ({"guided_grammar": 'start: ("a" "b")~3'}, "(ab){3}"),
    "text": ({"response_format": {"type": "text"}}, "(?s).*"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_every_kind_of_structure_is_followed(
    served: Served, name: str, path: str
) -> None:
    asked, pattern = CASES[name]
    start = {"prompt": PROMPT} if path == "completions" else {"messages": USER}
    reply = post(served, path, **start, **asked, max_tokens=120, seed=7)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    assert re.fullmatch(pattern, text)


def test_answers_of_type_json_object_are_json_objects(client: openai.OpenAI) -> None:
    for seed in range(6):
        found = client.chat.completions.create(
            model=MODEL_NAME,
            messages=USER,
            response_format={"type": "json_object"},
            temperature=0.8,
            seed=seed,
            max_tokens=200,
        )
        [choice] = found.choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or ""), dict)


def schema(value: object) -> dict[str, Any]:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    return {"response_format": format}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "schema": (schema({"type": "frob"}), "response_format"),
    "keyword": (schema({"type": "array", "uniqueItems": True}), "response_format"),
    "file": (schema({"$ref": "file:///etc/passwd"}), "response_format"),
    "two": (
        {"structured_outputs": {"regex": "a"}, "response_format": FORMAT},
        "response_format",
    ),
    "guided and plain": (
        {"guided_regex": "a", "response_format": FORMAT},
        "response_format",
    ),
    "guided": ({"guided_regex": "(a"}, "guided_regex"),
    "both": (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
    ),
    "regex": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    "grammar": ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs"),
    "large": ({"structured_outputs": {"regex": "a?" * 5000}}, "structured_outputs"),
    "empty": ({"structured_outputs": {"choice": []}}, "structured_outputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_structures_that_cannot_be_followed_get_400_with_the_reason(
    served: Served, name: str
) -> None:
    asked, param = WRONG[name]
    reply = post(served, "chat/completions", messages=USER, **asked)
    error = reply.json()["error"]
    assert reply.status_code == 400 and (error["param"] or "") == param
    assert error["message"].startswith(param) and len(error["message"]) < 600


def test_structured_and_plain_requests_do_not_change_each_other(
    served: Served,
) -> None:
    """At the same time as alone, with seeds."""
    bodies: list[dict[str, Any]] = []
    for seed in range(6):
        own = {"response_format": FORMAT} if seed % 2 else {}
        bodies.append({"prompt": PROMPT, "seed": seed, "max_tokens": 60, **own})
    alone = [post(served, **body).json()["choices"][0]["text"] for body in bodies]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = post(served, **bodies[i]).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(bodies))] == alone


def test_a_client_that_leaves_a_structured_answer_frees_everything(
    served: Served,
) -> None:
    body = {"prompt": PROMPT, "structured_outputs": {"regex": "[ab]{3000}"}}
    connections = [raw_request(served, **body, max_tokens=2000) for _ in range(3)]
    for connection in connections:
        connection.close()
    assert served.idle()


def test_one_clients_structures_hold_up_nobody_elses(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While six of one client wait, a structure seen before is answered at once, and a
    new one of another client after one of theirs at most."""
    guides = served.llm._sequences.guides
    compiles, turns = guides._compile, threading.Semaphore(0)

    def held(structure: Structure, seconds: float) -> object:
        if "slow" in structure.text:
            turns.acquire(timeout=60)
        return compiles(structure, seconds)

    def ask(pattern: str, key: str) -> int:
        said = {
            "prompt": "a",
            "max_tokens": 4,
            "structured_outputs": {"regex": pattern},
        }
        return post(served, "completions", key, **said).status_code

    assert ask("known|so", "sk-other") == 200
    monkeypatch.setattr(guides, "_compile", held)
    with ThreadPoolExecutor(7) as pool:
        flood = [pool.submit(ask, f"slow{i}", KEY) for i in range(6)]
        while len(guides._queue._turns) < 6:
            time.sleep(0.01)
        assert ask("known|so", "sk-other") == 200
        new = pool.submit(ask, "new|so", "sk-other")
        while len(guides._queue._turns) < 7:
            time.sleep(0.01)
        assert not any(one.done() for one in flood)
        turns.release()
        assert new.result(60) == 200
        assert sum(one.done() for one in flood) <= 1
        turns.release(6)
        assert [one.result(60) for one in flood] == [200] * 6
