"""Thoughts before an answer: read by each convention, streamed as whole, ended by a
budget, and followed by a structure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.runtime.text.guide import Guides
from kvlathe.runtime.text.masks import no_bits
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.conventions import HERMES
from kvlathe.server.harmony import MARKS, HarmonyReader, name_thoughts
from kvlathe.server.manner import calling_of, manner_of, template_values
from kvlathe.server.pieces import Reader
from kvlathe.server.read_answers import TextReader
from kvlathe.server.reasoning import CONVENTIONS, Thinking, Thoughts, thinking_of
from kvlathe.server.schema import ChatRequest
from kvlathe.server.tool_parser import ToolParser
from tests.support.runtime_cases import MODEL, llm
from tests.support.serving_cases import MODEL_NAME, Served, post, serving, with_template
from tests.support.tool_cases import WEATHER

pytest.importorskip("llguidance", reason="llguidance is not installed")
Json = dict[str, Any]
PLAIN = next(one for one in CONVENTIONS if one.shows == ("</think>",))
USER: list[Any] = [{"role": "user", "content": "a"}]
GREEDY: Json = {"model": MODEL_NAME, "temperature": 0}
"""A drawn answer may end at once, or think white space alone."""


def read(reader: Reader, pieces: list[str]) -> tuple[str, str, dict[int, str]]:
    """Thoughts, text, and the name and arguments of each call."""
    thought, text = "", ""
    calls: dict[int, str] = {}
    found = [one for piece in pieces for one in reader.push(piece)]
    for one in [*found, *reader.close()]:
        thought, text = thought + one.thought, text + one.text
        if one.index >= 0:
            said = calls.get(one.index, "")
            calls[one.index] = said + one.name + one.arguments
    return thought, text, calls


def split(convention: Thinking, text: str, inside: bool | None) -> tuple[str, str]:
    """Thoughts and text of a whole answer, by regular expressions."""
    begins = "" if inside else rf"\s*{re.escape(convention.begin)}"
    found = None if inside is False else re.match(rf"(?s){begins}\s*(.*)", text)
    follows, thought, rest = convention.follows, "", text
    if found:
        thought, ended, rest = found[1].partition(convention.end)
        if not ended:
            return thought, ""
        thought, rest = thought.rstrip(), rest.lstrip()
    opened = follows and rest.lstrip().startswith(follows)
    if opened and (found or inside is None):
        rest = rest.lstrip().removeprefix(follows).lstrip()
        rest = rest.replace(convention.closes, "")
    return thought, rest


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda one: one.begin)
@pytest.mark.parametrize("inside", [True, False, None])
@settings(max_examples=300)
@given(data=st.data())
def test_thoughts_are_split_off_however_the_text_comes(
    convention: Thinking, inside: bool | None, data: st.DataObject
) -> None:
    parts = [
        *convention.marks,
        convention.end[:3],
        convention.begin[:4],
        " ",
        "\n",
        "ab",
    ]
    strewn = data.draw(st.lists(st.sampled_from(parts), max_size=9))
    text = "".join(strewn)
    if convention.closes and text.count(convention.closes) > 1:
        return
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    for each in ([text], pieces, [*text]):
        thought, said, _ = read(TextReader(Thoughts(convention, inside), None), each)
        expected = split(convention, text, inside)
        assert (thought, said) == expected


def test_calls_behind_thoughts_are_calls_and_those_inside_are_thoughts() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>\nMaybe {call}?\n</think>\n\n{call}"
    for pieces in ([text], [*text]):
        reader = TextReader(Thoughts(PLAIN, None), ToolParser(HERMES))
        found = read(reader, pieces)
        assert found == (f"Maybe {call}?", "", {0: 'f{"a": 1}'})


HARMONY: dict[str, tuple[str, tuple[str, str, dict[int, str]]]] = {
    "final": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Hello",
        ("Hm.", "Hello", {}),
    ),
    "call": (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}',
        ("Look.", "", {0: 'weather{"city": "Bern"}'}),
    ),
    "recipient first": (
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"
        "<|call|>",
        ("", "", {0: "now{}"}),
    ),
    "preamble": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>"
        "commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        ("", "I look.", {0: "f{}"}),
    ),
    "no form": ("Hello <|chan", ("", "Hello <|chan", {})),
    "cut thought": ("<|channel|>analysis<|message|>Hm", ("Hm", "", {})),
    "cut header": (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assist",
        ("Hm", "", {}),
    ),
}


@pytest.mark.parametrize("name", HARMONY)
def test_messages_of_harmony_are_thoughts_text_and_calls(name: str) -> None:
    text, expected = HARMONY[name]
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(HarmonyReader(), pieces) == expected


FRAGMENTS = (
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"),
    *("analysis", "final", "commentary", " to=functions.f", " <|constrain|>json"),
    *("assistant", "{", "}", '"a"', "<|", "|>", " ", "words "),
)


@settings(max_examples=1000)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.sets(st.integers(0, 200), max_size=6),
)
def test_one_text_of_harmony_has_one_reading(
    fragments: list[str], cuts: set[int]
) -> None:
    text = "".join(fragments)
    pieces = [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]
    whole = read(HarmonyReader(), [text])
    assert read(HarmonyReader(), pieces) == whole == read(HarmonyReader(), [*text])


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        ("{{ content.split('</think>')[-1] }}", "<think>"),
        ("<think></think> and <response></response>", "<think>"),
        ("[THINK]{{ x }}[/THINK]", "[THINK]"),
        ("'Here is my thought process:' and", "Here is my thought process:"),
        ("{{ messages }}", None),
    ],
)
def test_templates_show_how_their_model_thinks(
    template: str, begin: str | None
) -> None:
    found = thinking_of(template, Tokenizer(MODEL))
    assert (found and found.begin) == begin


@pytest.mark.parametrize(
    ("effort", "known", "expected"),
    [
        ("none", {"enable_thinking"}, {"enable_thinking": False}),
        ("low", {"enable_thinking"}, {"enable_thinking": True}),
        ("high", {"reasoning_effort"}, {"reasoning_effort": "high"}),
        ("minimal", {"reasoning_effort"}, {"reasoning_effort": "low"}),
        ("medium", {"thinking"}, {"thinking": True}),
        ("low", set(), {}),
        (None, {"enable_thinking"}, {}),
    ],
)
def test_an_effort_is_what_the_template_makes_of_it(
    effort: str | None, known: set[str], expected: Json
) -> None:
    request = ChatRequest.model_validate(
        {"model": "m", "messages": USER, "reasoning_effort": effort}
    )
    assert template_values(request, frozenset(known), True) == expected


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
OPEN = TURNS + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
"""A template whose prompts end inside of thoughts."""
FREE = "{# </think> #}" + TURNS
"""One whose model begins them itself."""


@pytest.fixture(scope="module", params=[OPEN, FREE], ids=["open", "free"])
def thinking(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(with_template(llm("torch", "split"), request.param)) as found:
        yield found
        assert found.idle()


@pytest.fixture(scope="module")
def opened() -> Iterator[Served]:
    with serving(with_template(llm("torch", "split"), OPEN)) as found:
        yield found
        assert found.idle()


def ask(served: Served, **fields: Any) -> Json:  # noqa: ANN401
    asked: Any = {"messages": USER, "temperature": 0.8, "seed": 5, **fields}
    reply = post(served, "chat/completions", **asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(reply: httpx.Response) -> tuple[str, str, Json]:
    """Thoughts, text and usage of a stream."""
    thought, text, usage = "", "", Json()
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                thought += choice["delta"].get("reasoning_content", "")
                text += choice["delta"].get("content") or ""
    return thought, text, usage


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_a_budget_ends_thoughts_and_the_structure_follows(
    opened: Served, budget: int
) -> None:
    """Streamed as whole; the tokens of thoughts are the budget and the mark."""
    asked: Json = {
        "structured_outputs": {"regex": "[a-c]{3}!"},
        "thinking_token_budget": budget,
        "max_tokens": 60,
    }
    whole = ask(opened, **asked)
    message, usage = whole["choices"][0]["message"], whole["usage"]
    assert re.fullmatch("[a-c]{3}!", message["content"])
    mark = len(opened.llm.tokenizer.encode("</think>"))
    spent = usage["completion_tokens_details"]["reasoning_tokens"]
    assert spent == budget + mark
    reply = post(
        opened,
        "chat/completions",
        messages=USER,
        temperature=0.8,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
        **asked,
    )
    thought, text, counted = streamed(reply)
    assert (thought, text) == (message.get("reasoning_content", ""), message["content"])
    assert counted["completion_tokens_details"] == usage["completion_tokens_details"]


def test_a_structure_begins_after_thoughts_and_nothing_ends_them_before(
    thinking: Served,
) -> None:
    """The end of text is made likely all the time."""
    [end, *_] = thinking.llm.tokenizer.eos_ids
    found = ask(
        thinking,
        response_format={"type": "json_object"},
        thinking_token_budget=12,
        logit_bias={str(end): 50},
        max_tokens=200,
        n=3,
    )
    for choice in found["choices"]:
        assert choice["finish_reason"] == "stop"
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_a_call_that_must_be_comes_behind_thoughts() -> None:
    told = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + OPEN
    tool = {"type": "function", "function": {"name": "now"}}
    with serving(with_template(llm("torch", "split"), told)) as served:
        found = ask(
            served,
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            thinking_token_budget=7,
            max_tokens=90,
        )
    [choice] = found["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}
    assert choice["message"]["reasoning_content"]


def test_no_effort_ends_thoughts_in_the_prompt(opened: Served) -> None:
    found = ask(opened, reasoning_effort="none", max_tokens=9)
    assert "reasoning_content" not in found["choices"][0]["message"]
    assert "completion_tokens_details" not in found["usage"]
    kept = opened.llm.tokenizer.encode(
        "<user>a\n<assistant><think>\n\n</think>\n\n", add_special_tokens=False
    )
    assert found["usage"]["prompt_tokens"] == len(kept)


def test_fields_about_thoughts_that_a_model_cannot_follow_are_refused(
    served: Served,
) -> None:
    fields: Any = ({"reasoning_effort": "high"}, {"thinking_token_budget": 5})
    for field in fields:
        reply = post(served, "chat/completions", messages=USER, max_tokens=2, **field)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] in field
    assert post(
        served, "chat/completions", messages=USER, max_tokens=2, reasoning_effort="none"
    ).is_success


def test_thoughts_are_items_of_responses_and_blocks_of_messages(opened: Served) -> None:
    client = openai.OpenAI(base_url=f"{opened.url}/v1", api_key="x", max_retries=0)
    fields: Any = {"extra_body": {"thinking_token_budget": 6, "seed": 5}}
    found = client.responses.create(
        model=MODEL_NAME, input="a", max_output_tokens=20, **fields
    )
    thought, *said = found.output
    assert thought.type == "reasoning" and thought.content
    assert [item.type for item in said] == ["message"]
    assert found.usage and found.usage.output_tokens_details.reasoning_tokens >= 6
    asked: Json = {**GREEDY, "messages": USER, "max_tokens": 40}
    budget = {"type": "enabled", "budget_tokens": 6}
    url = f"{opened.url}/v1/messages"
    whole = httpx.post(url, json={**asked, "thinking": budget}, timeout=60).json()
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text"] and whole["content"][0]["signature"]
    plain = httpx.post(url, json=asked, timeout=60).json()
    assert [block["type"] for block in plain["content"]] == ["text"]


SHY = TURNS + "{% if thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
"""A template that lets its model think only where it is told to."""
CHANNELS = TURNS + "{# <|channel|><|message|> #}"


def test_messages_that_ask_for_thoughts_have_them_where_the_template_does_not_think() -> (
    None
):
    with serving(with_template(llm("torch", "split"), SHY)) as served:
        url = f"{served.url}/v1/messages"
        asked: Json = {**GREEDY, "messages": USER, "max_tokens": 40}
        for kind in ("enabled", "adaptive"):
            thinking = {"type": kind, "budget_tokens": 6}
            whole = httpx.post(
                url, json={**asked, "thinking": thinking}, timeout=60
            ).json()
            assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
        plain = httpx.post(url, json=asked, timeout=60).json()
        assert [block["type"] for block in plain["content"]] == ["text"]


def test_marks_in_words_of_a_user_begin_no_thoughts() -> None:
    turns = [
        {"role": "user", "content": "what does <think> mean?"},
        {"role": "assistant", "content": "It is"},
    ]
    fields: Json = {"continue_final_message": True, "add_generation_prompt": False}
    told = (
        "{# </think> #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    with serving(with_template(llm("torch", "split"), told)) as served:
        for begun, thinks in (("It is", False), ("<think>It is", True)):
            turns[1]["content"] = begun
            reply = post(
                served, "chat/completions", messages=turns, max_tokens=3, **fields
            )
            message = reply.json()["choices"][0]["message"]
            assert ("reasoning_content" in message) is thinks


def test_an_answer_on_channels_cannot_go_on_in_the_middle() -> None:
    turns = [*USER, {"role": "assistant", "content": "It is"}]
    fields: Json = {"continue_final_message": True, "add_generation_prompt": False}
    with serving(with_template(llm("torch", "split"), CHANNELS)) as served:
        reply = post(served, "chat/completions", messages=turns, max_tokens=3, **fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "continue_final_message"


def test_log_probabilities_are_those_of_the_text_alone(opened: Served) -> None:
    client = openai.OpenAI(base_url=f"{opened.url}/v1", api_key="x", max_retries=0)
    found = client.responses.create(
        model=MODEL_NAME,
        input="a",
        max_output_tokens=30,
        include=["message.output_text.logprobs"],
        extra_body={"thinking_token_budget": 6, "seed": 5},
    )
    [said] = [item for item in found.output if item.type == "message"]
    assert said.content[0].type == "output_text"
    part = said.content[0]
    assert part.logprobs
    assert "".join(one.token for one in part.logprobs).lstrip() == part.text


def test_earlier_thoughts_have_the_name_that_harmony_has_for_them() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    for turn, expected in (
        ({**call, "reasoning_content": "a"}, {**call, "thinking": "a"}),
        ({**call, "content": "b", "reasoning_content": "a"}, {**call, "content": "b"}),
        ({"role": "user", "content": "c"}, {"role": "user", "content": "c"}),
    ):
        name_thoughts(turn)
        assert turn == expected


@pytest.mark.parametrize("thinks", [True, False])
def test_calls_of_harmony_that_must_be_are_held_to_their_schema(
    tmp_path: Path, thinks: bool
) -> None:
    """With its marks as special tokens, which the grammar names by their ids."""
    backend = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    backend.add_special_tokens([*MARKS, "<|constrain|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    own = Tokenizer(tmp_path)
    size = own.backend.get_vocab_size(with_added_tokens=True)
    template = "{{ tools }}<|channel|><|message|>"
    manner = manner_of(template, own, calling_of(template), {})
    tools: dict[str, Json | bool] = {"weather": WEATHER, "now": {"type": "object"}}
    assert manner.calling is not None
    structure = manner.structure(manner.calling.structure(tools, True, own), True)
    assert structure is not None
    guide = Guides(own, size).guide(structure)
    header = "<|channel|>commentary to=functions."
    if thinks:
        header = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{header}"
    call = 'weather <|constrain|>json<|message|>{"city": "Bern", "unit": "C"}'
    text = header + call
    for token in own.encode(text, add_special_tokens=False):
        bits = no_bits(1, size)
        guide.fill(bits)
        assert bits.view("uint32")[0, token // 32] >> token % 32 & 1
        guide.accept(token)
    assert guide.failure is None
    expected = {0: 'weather{"city": "Bern", "unit": "C"}'}
    assert read(manner.reading.reader(), [*text]) == ("Hm." * thinks, "", expected)
