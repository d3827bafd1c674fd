"""The tokenizer against transformers' reading of the same files; streams against
decoding at once."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from kvlathe.base import tokenizer_files
from kvlathe.base.chat_template import Template
from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.text.tokenizer import (
    UNFINISHED,
    TextStream,
    Tokenizer,
    byte_alphabet,
)
from kvlathe.tasks.tasks import FolderEncoder
from tests.support.runtime_cases import MODEL

OURS = Tokenizer(MODEL)
TEXTS = st.text(max_size=60) | st.sampled_from(
    ["def f(x):\n    return x", "naïve 日本語 👩‍👩‍👧 end", " leading", ""]
)

TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}
    {%- if m.content is mapping %}{{ m.content | tojson }}{% else %}
<|{{ m.role }}|>{{ m.content | trim }}<|end|>
    {% endif %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}{{ strftime_now('%Y') }}"""
END = {
    "__type": "AddedToken",
    "content": "</s>",
    "lstrip": False,
    "rstrip": False,
    "special": True,
}
CHAT = [
    {"role": "user", "content": " <b>hi</b> "},
    {"role": "assistant", "content": {"a": "<é>"}},
]


def sentencepiece_like(folder: Path, config: dict[str, object], framed: bool) -> Path:
    """A Llama-2-like tokenizer: metaspace, byte fallback; ``framed``: its
    post-processor adds the first token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁helow"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if framed:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    kind = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": END,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | config))
    return folder


@settings(max_examples=60)
@given(text=TEXTS)
def test_ids_and_text_are_those_of_transformers(text: str) -> None:
    theirs = AutoTokenizer.from_pretrained(MODEL)
    assert OURS.encode(text) == theirs(text)["input_ids"]
    assert (
        OURS.encode(text, add_special_tokens=False)
        == theirs(text, add_special_tokens=False)["input_ids"]
    )
    ids = [*OURS.encode(text), 0]
    assert OURS.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize(
    "config",
    [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}],
)
def test_the_first_token_is_added_where_transformers_adds_it(
    tmp_path: Path, framed: bool, config: dict
) -> None:
    folder = sentencepiece_like(tmp_path, config, framed)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("hello", "", "</s>hello <s>"):
        assert Tokenizer(folder).encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize("placed", ["config", "list", "file"])
def test_chat_prompts_are_those_of_transformers(tmp_path: Path, placed: str) -> None:
    shutil.copytree(
        MODEL,
        tmp_path,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.safetensors"),
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    if placed == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        config["chat_template"] = "the file comes first"
    else:
        named = [
            {"name": "default", "template": TEMPLATE},
            {"name": "tool_use", "template": "tools"},
        ]
        config["chat_template"] = TEMPLATE if placed == "config" else named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for generation in (True, False):
        expected = theirs.apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=generation
        )
        assert (
            Tokenizer(tmp_path).chat_prompt(CHAT, add_generation_prompt=generation)
            == expected
        )
    with pytest.raises(KvlatheError, match="no role system"):
        Tokenizer(tmp_path).chat_prompt([{"role": "system", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for %}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(tmp_path: Path, template: str) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(KvlatheError, match="refused"):
        Tokenizer(tmp_path).chat_prompt(CHAT)


def test_without_a_template_there_is_no_chat() -> None:
    with pytest.raises(KvlatheError, match="no chat template"):
        OURS.chat_prompt(CHAT)


NULL = {"eos_token_id": None}
SIZE = 3 + 256 + len("▁helow")
"""Tokens of ``sentencepiece_like``."""


@pytest.mark.parametrize(
    ("generation", "config", "names", "older", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {"eos_token": "</s>"}, {}, (5,)),
        (
            {"eos_token_id": [7, 5]},
            {"eos_token_id": 6},
            {"eos_token": "</s>"},
            {},
            (7, 5),
        ),
        (NULL, {"eos_token_id": [6, 4]}, {"eos_token": "</s>"}, {}, (6, 4)),
        ({"eos_token_id": []}, {"eos_token_id": 0}, {"eos_token": "</s>"}, {}, (0,)),
        (NULL, NULL, {"eos_token": END}, {"eos_token": "<s>"}, (1,)),
        (
            NULL,
            NULL,
            {"eos_token": END, "added_tokens_decoder": {}},
            {"eos_token": "<s>"},
            (2,),
        ),
        ({}, {}, {"eos_token": None}, {"eos_token": {"content": "<s>"}}, (1,)),
        (NULL, {}, {"eos_token": "a new one"}, {}, (SIZE,)),
        (NULL, {"vocab_size": SIZE}, {"eos_token": "a new one"}, {}, ()),
        ({"eos_token_id": [999, 5]}, {"vocab_size": SIZE}, {}, {}, (5,)),
        ({"eos_token_id": 999}, {"text_config": {"vocab_size": 9}}, {}, {}, ()),
        ({"eos_token_id": SIZE}, {"vocab_size": SIZE, "eos_token_id": 1}, {}, {}, (1,)),
        ({}, NULL, {}, {}, ()),
    ],
)
def test_ending_ids_are_those_of_the_first_file_that_names_any(
    tmp_path: Path,
    generation: dict,
    config: dict,
    names: dict,
    older: dict,
    expected: tuple[int, ...],
) -> None:
    folder = sentencepiece_like(tmp_path, {}, framed=False)
    files = {
        "generation_config": generation,
        "config": config,
        "tokenizer_config": names,
        "special_tokens_map": older,
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    ours = Tokenizer(folder)
    assert ours.eos_ids == expected
    if expected:
        assert (
            FolderEncoder(folder).eos_id
            == tokenizer_files.separator(ours.eos_ids)
            == expected[0]
        )
    else:
        with pytest.raises(
            KvlatheError, match=r"no end-of-text token.*generation_config\.json"
        ):
            _ = FolderEncoder(folder).eos_id


def test_special_tokens_of_the_older_file_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    folder = sentencepiece_like(tmp_path, {}, framed=True)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": END})
    )
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    assert ours.special == {
        "bos_token": theirs.bos_token,
        "eos_token": theirs.eos_token,
    }
    assert ours.eos_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize(
    "content", ["{", "[]", "", '{"eos_token_id": "2"}', '{"eos_token_id": [true]}']
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("read", [Tokenizer, FolderEncoder])
def test_a_file_that_cannot_be_understood_is_named(
    tmp_path: Path, read: type, name: str, content: str
) -> None:
    folder = sentencepiece_like(tmp_path, {}, framed=False)
    (folder / name).write_text(content)
    with pytest.raises(KvlatheError, match=name):
        read(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no tokenizer.json.*AutoTokenizer"),
        ("{", "cannot be read"),
        ("[]", "cannot be"),
    ],
)
@pytest.mark.parametrize("read", [Tokenizer, FolderEncoder])
def test_unreadable_tokenizers_are_refused(
    tmp_path: Path, read: type, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(KvlatheError, match=words):
        read(tmp_path).encode("text")


# -- pieces of text --------------------------------------------------------------------
@settings(max_examples=60)
@given(text=TEXTS)
def test_pieces_of_tokens_make_up_the_text(text: str) -> None:
    ids, bytes_ = OURS.encode(text), text.encode()
    pieces = [OURS.piece(token) for token in ids]
    assert b"".join(pieces) == bytes_
    for i, start in enumerate(
        OURS.starts(text)
    ):  # in characters; a token inside of one begins where it does
        before = len(b"".join(pieces[:i]))
        assert start == len(bytes_[:before].decode(errors="ignore"))


def test_pieces_keep_what_a_texts_beginning_loses(tmp_path: Path) -> None:
    ours = Tokenizer(sentencepiece_like(tmp_path, {}, True))
    ids = ours.encode("hello wé")
    assert b"".join(map(ours.piece, ids)) == "<s> hello wé".encode()
    assert ours.piece(3 + 0xC3) == b"\xc3" and ours.special_ids == {0, 1, 2}
    assert Tokenizer(tmp_path / "none").piece(5) == b""


def test_other_threads_run_while_a_long_text_is_split() -> None:
    """An engine's thread among them: a client's text must not stop everybody's
    answers."""
    ticks, over = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    other = threading.Thread(target=tick)
    other.start()
    OURS.encode("hello world " * 40_000)
    over.set()
    other.join()
    assert ticks > 3


# -- streaming -------------------------------------------------------------------------
@settings(max_examples=150)
@given(
    ids=st.lists(st.integers(0, 8191), max_size=30),
    prompt=st.lists(st.integers(0, 8191), max_size=8),
)
def test_streamed_pieces_are_the_text_of_any_tokens(
    ids: list[int], prompt: list[int]
) -> None:
    stream = TextStream(OURS, prompt)
    pieces = [stream.push(token) for token in ids]
    pieces.append(stream.close())
    assert "".join(pieces) == stream.text
    assert OURS.decode(prompt[-4:]) + stream.text == OURS.decode(
        prompt[-4:] + ids
    ) or "\ufffd" in OURS.decode(prompt[-4:])


@settings(max_examples=150)
@given(text=st.text(min_size=1, max_size=40))
def test_no_character_is_broken(text: str) -> None:
    stream = TextStream(OURS)
    for token in OURS.encode(text):
        assert "\ufffd" not in stream.push(token) or "\ufffd" in text
    stream.close()
    assert stream.text == OURS.decode(OURS.encode(text))


def test_streams_keep_the_spaces_that_decoding_at_once_keeps(tmp_path: Path) -> None:
    ours = Tokenizer(sentencepiece_like(tmp_path, {}, True))
    prompt, ids = (
        ours.encode("hello"),
        ours.encode(" hello wé", add_special_tokens=False),
    )
    stream = TextStream(ours, prompt)
    pieces = [stream.push(token) for token in ids] + [stream.close()]
    assert "".join(pieces) == ours.decode(prompt + ids).removeprefix("hello")


@pytest.mark.parametrize("kind", ["bytes", "byte fallback"])
@settings(max_examples=60)
@given(text=st.text("aé日😀\ufffd ", min_size=1, max_size=12), data=st.data())
def test_an_answer_completes_the_character_that_its_prompt_ends_in(
    kind: str, text: str, data: st.DataObject
) -> None:
    ours = OURS if kind == "bytes" else fallback()
    ids = ours.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    stream = TextStream(ours, ids[:cut])
    answer = "".join([*map(stream.push, ids[cut:]), stream.close()])
    assert ours.decode_whole(ids[:cut]) + answer == ours.decode(ids)


@cache
def fallback() -> Tokenizer:
    with tempfile.TemporaryDirectory() as name:
        return Tokenizer(sentencepiece_like(Path(name), {}, False))


@pytest.mark.parametrize("byte", [0x80, 0xE6, 0xF0, 0xFF])
def test_bytes_that_never_become_a_character_cost_linear_time(byte: int) -> None:
    """Counted in tokens that are decoded, as a clock would say what else runs."""
    name = {own: c for c, own in byte_alphabet().items()}[byte]
    token = OURS.backend.token_to_id(name)
    assert token is not None
    decoded = 0

    class Counted(Tokenizer):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            nonlocal decoded
            decoded += len(ids)
            return super().decode(ids, skip_special_tokens)

    stream, count = TextStream(Counted(MODEL)), 400
    for _ in range(count):
        stream.push(token)
    shown = stream.text
    stream.close()
    assert stream.text == OURS.decode([token] * count) == UNFINISHED * count
    assert len(shown) >= count - 8 and decoded < 30 * count


@settings(max_examples=200)
@given(
    text=st.text("ab -", max_size=30),
    stop=st.lists(st.text("ab -", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    whole = OURS.decode(OURS.encode(text))
    stream, pieces = TextStream(OURS, stop=stop), []
    for token in OURS.encode(text):
        pieces.append(stream.push(token))
        assert not any(s in "".join(pieces) for s in stop)
        if stream.stopped:
            break
    pieces.append(stream.close())
    assert "".join(pieces) == stream.text
    # What counts is the text once the token that completes a stop string is there: the
    # first stop in it.
    assert stream.text == whole[
        : min([at for s in stop if (at := whole.find(s)) >= 0], default=len(whole))
    ] or (
        stream.stopped
        and whole.startswith(stream.text)
        and any(whole[len(stream.text) :].startswith(s) for s in stop)
    )


LISTED = [
    {"name": "default", "template": TEMPLATE},
    {"name": "tool_use", "template": "{{ tools | tojson }}" + TEMPLATE},
    {"name": "rag", "template": "rag"},
]


@pytest.mark.parametrize("placed", ["list", "files"])
@pytest.mark.parametrize("tools", [None, [], [{"type": "function"}]])
def test_conversations_with_tools_have_the_template_that_transformers_takes(
    tmp_path: Path, placed: str, tools: list[dict] | None
) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    if placed == "list":
        config: dict[str, object] = {"chat_template": LISTED}
    else:
        config = {"chat_template": "files come first"}
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        (tmp_path / "additional_chat_templates").mkdir()
        more = tmp_path / "additional_chat_templates" / "tool_use.jinja"
        more.write_text(LISTED[1]["template"])
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        CHAT, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert Tokenizer(tmp_path).chat_prompt(CHAT, tools=tools) == expected


@pytest.mark.parametrize("trim", ["", " | trim"])
@pytest.mark.parametrize("said", ["x", "The answer is ", " a\n"])
def test_prompts_that_go_on_end_as_those_of_transformers(
    tmp_path: Path, trim: str, said: str
) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content" + trim + " }}</>"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template + "{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = [CHAT[0], {"role": "assistant", "content": said}]
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        chat, tokenize=False, continue_final_message=True
    )
    assert (
        Tokenizer(tmp_path).chat_prompt(chat, continue_final_message=True) == expected
    )


def templated(folder: Path, template: str) -> Tokenizer:
    shutil.copy(MODEL / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


KNOWS = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}You help.{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""A template with a system message of its own, that passes over roles it does not
know."""


@pytest.mark.parametrize(
    ("chat", "left_out"),
    [
        ([turn("user", "a")], None),
        ([turn("system", "You help."), turn("user", "a")], None),
        ([turn("user", "a"), turn("assistant", "a"), turn("user", "a")], None),
        ([turn("user", "a"), turn("tool", " ")], None),
        ([turn("user", "a"), turn("tool", "a")], "message 2 .tool"),
        ([turn("developer", "be brief"), turn("user", "a")], "message 1 .developer"),
        ([turn("user", "a"), turn("system", "b"), turn("user", "c")], "message 2 "),
    ],
)
def test_a_message_that_a_template_leaves_out_is_refused(
    tmp_path: Path, chat: list[dict], left_out: str | None
) -> None:
    """And only such a one: not where its words are those of the template or of another
    message."""
    tokenizer = templated(tmp_path, KNOWS)
    if left_out is None:
        assert "<user>a" in tokenizer.chat_prompt(chat)
        return
    with pytest.raises(KvlatheError, match=left_out):
        tokenizer.chat_prompt(chat)


def test_a_template_that_reads_what_a_message_says_may_change_it(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages %}{% if m.content != 'go' %}{{ raise_exception('') }}"
        "{% endif %}ok{% endfor %}"
    )
    assert templated(tmp_path, template).chat_prompt([turn("user", "go")]) == "ok"


def test_known_roles_cost_one_rendering_and_changed_words_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content.split('</think>')[-1] }}{% endfor %}"
    )
    tokenizer = templated(tmp_path, template)
    rendered: list[str] = []
    render = Template.render

    def counted(self: Template, **values: object) -> str:
        rendered.append(render(self, **values))
        return rendered[-1]

    monkeypatch.setattr(Template, "render", counted)
    chat = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    for expected in (2, 1, 1):  # the first time, each role is looked for
        rendered.clear()
        tokenizer.chat_prompt(chat * 40)
        assert len(rendered) == expected
    rendered.clear()
    thought = turn("assistant", "<think>so</think>b")
    assert "so" not in tokenizer.chat_prompt(
        [chat[0], thought, *[thought, chat[0]] * 9]
    )
    assert len(rendered) == 2


def test_a_message_that_calls_tools_may_lose_its_text(tmp_path: Path) -> None:
    """As with templates of Llama 3."""
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].name }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    calls = turn("assistant", "I look.") | {"tool_calls": [{"name": "look"}]}
    chat = [turn("user", "a"), calls]
    assert templated(tmp_path, template).chat_prompt(chat) == "alook"


def test_a_message_without_text_is_continued_at_its_beginning(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }}{% endfor %}"
    )
    found = templated(tmp_path, template)
    chat = [turn("user", "a"), turn("assistant", " ")]
    assert (
        found.chat_prompt(chat, continue_final_message=True) == "<user> a<assistant> "
    )
