"""Guides: masks allow exactly the tokens by which a text can still become one that its
structure describes, and nothing is compiled without bounds."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.text import walked
from kvlathe.runtime.text.guide import Guides, StructureError, masks_of
from kvlathe.runtime.text.masks import Guide, Masks, apply_masks, no_bits
from kvlathe.runtime.text.schema_numbers import BOUNDS, LOWER
from kvlathe.runtime.text.structure import Calls, Structure
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.runtime_cases import MODEL

pytest.importorskip("llguidance", reason="llguidance is not installed")
VOCABULARY = 8192
BUSY = 20.0
"""Seconds that compiling may take beside other work: two trials of 0.25 and 2 s."""


@cache
def guides() -> Guides:
    return Guides(tokenizer(), VOCABULARY)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


def allowed(guide: Guide) -> set[int]:
    """The tokens of a guide's mask."""
    masks = masks_of([guide])
    assert masks
    logits = np.zeros((1, VOCABULARY), np.float32)
    return set(np.flatnonzero(np.isfinite(apply_masks(logits, masks))[0]).tolist())


def begins_one(text: bytes, whole: list[bytes]) -> bool:
    return any(one.startswith(text) for one in whole)


@settings(max_examples=25, deadline=None)
@given(
    words=st.lists(st.text("abn. é", min_size=1, max_size=6), min_size=1, max_size=5),
    picks=st.lists(st.integers(0, 9999), max_size=6),
)
def test_masks_of_choices_are_tokens_that_begin_one(
    words: list[str], picks: list[int]
) -> None:
    """Against every token of the vocabulary tried by hand. Where the text is forced,
    only the tokenizer's own way to write it is left."""
    guide, said = guides().guide(Structure.choice(words)), b""
    whole = [word.encode() for word in words]
    pieces = {token: tokenizer().piece(token) for token in range(VOCABULARY)}
    ends = set(tokenizer().eos_ids)
    for pick in picks:
        if guide.stopped:
            break
        expected = {
            token
            for token, piece in pieces.items()
            if token not in tokenizer().special_ids and begins_one(said + piece, whole)
        }
        found = allowed(guide)
        assert found - ends <= expected and bool(found & ends) == (said in whole)
        if not found - ends:
            break
        token = sorted(found - ends)[pick % len(found - ends)]
        guide.accept(token)
        said += pieces[token]
    assert guide.failure is None and begins_one(said, whole)


@settings(max_examples=25, deadline=None)
@given(words=st.lists(st.text("abn. é{", min_size=1), min_size=1, max_size=5))
def test_every_choice_can_be_written_as_the_tokenizer_writes_it(
    words: list[str],
) -> None:
    for word in words:
        guide = guides().guide(Structure.choice(words))
        for token in tokenizer().encode(word, add_special_tokens=False):
            assert token in allowed(guide)
            guide.accept(token)
        ends = set(tokenizer().eos_ids)
        assert guide.stopped or allowed(guide) & ends


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_walks_through_a_pattern_end_in_a_match(seed: int) -> None:
    pattern, random = r"[a-f]{2,5}(-[0-9]{1,3}){1,2}x?", np.random.default_rng(seed)
    guide, tokens = guides().guide(Structure.regex(pattern)), list[int]()
    while not guide.stopped:
        token = int(random.choice(sorted(allowed(guide))))
        guide.accept(token)
        tokens.append(token)
    assert re.fullmatch(pattern, tokenizer().decode(tokens))


def test_guides_of_one_structure_do_not_share_their_place() -> None:
    structure = Structure.regex("ab|cd")
    first, second = guides().guide(structure), guides().guide(structure)
    before = allowed(second)
    first.accept(tokenizer().encode("a", add_special_tokens=False)[0])
    assert allowed(second) == before != allowed(first)


def test_a_token_that_may_not_follow_ends_the_answer_in_words() -> None:
    guide = guides().guide(Structure.regex("ab"))
    guide.accept(tokenizer().encode("c", add_special_tokens=False)[0])
    assert isinstance(guide.failure, StructureError) and not guide.stopped
    assert masks_of([guide, None]) is None


UNKNOWN = {
    "keyword": Structure.json({"type": "array", "uniqueItems": True}),
    "type": Structure.json({"type": "frob"}),
    "reference": Structure.json({"$ref": "#/$defs/none"}),
    "a file": Structure.json({"$ref": "file:///etc/passwd"}),
    "a page": Structure.json({"$ref": "http://127.0.0.1/schema"}),
    "limits": Structure.json({"x-guidance": {"lenient": True}}),
    "no text": Structure.json({"$ref": "#"}),
    "false": Structure.json(False),
    "contradiction": Structure.json({"allOf": [{"type": "null"}, {"type": "string"}]}),
    "regex": Structure.regex("(a"),
    "look-ahead": Structure.regex("(?=a)b"),
    "back reference": Structure.regex(r"(a)\1"),
    "rule": Structure.grammar("start: none"),
    "nested values": Structure.json({"const": json.loads("[" * 700 + "]" * 700)}),
    "nested": Structure.grammar("start: " + "(" * 4000 + '"a"' + ")" * 4000),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_structures_that_cannot_be_compiled_are_refused_in_a_line(name: str) -> None:
    with pytest.raises(StructureError) as refused:
        guides().guide(UNKNOWN[name])
    assert refused.value.reason and "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def chain(link: str, count: int) -> dict[str, object]:
    """Schemas that name each other, one after the other."""
    found: dict[str, object] = {f"a{count}": {"type": "string"}}
    for i in range(count):
        following = {"$ref": f"#/$defs/a{i + 1}"}
        own = {"items": following} if link == "items" else {link: [following]}
        found[f"a{i}"] = own
    return {"$ref": "#/$defs/a0", "$defs": found}


HOSTILE = {
    "exponential": Structure.regex(r"(a|b)*a(a|b){40}c"),
    "catastrophic": Structure.regex(r"((a+)+)+$"),
    "counted": Structure.regex(r"(((.{1,99}){1,99}){1,99}){1,99}"),
    "optional": Structure.regex("a?" * 2000),
    "classes": Structure.regex(r"\p{L}" * 800),
    "chain": Structure.json(chain("items", 1400)),
    "chain of choices": Structure.json(chain("anyOf", 1300)),
    "chain of rules": Structure.grammar(
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(390)) + 'r390: "a"'
    ),
    "wide": Structure.json(
        {"properties": {f"p{i}": {"type": "string"} for i in range(1800)}}
    ),
    "many": Structure.json({"anyOf": [{"const": f"c{i}"} for i in range(2500)]}),
    "ambiguous": Structure.grammar('start: a\na: a a a | a a | "a" | "b" |'),
    "endless": Structure.grammar('start: a\na: "x" a'),
    "long": Structure.json({"type": "string", "minLength": 4_000_000_000}),
    "multiple": Structure.json({"type": "integer", "multipleOf": 19_997}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_structures_take_bounded_time(name: str) -> None:
    """They are refused, or each of their steps is short; nothing is raised but
    refusals, and the process lives."""
    started, slowest = time.perf_counter(), 0.0
    try:
        guide = guides().guide(HOSTILE[name])
    except KvlatheError:
        assert time.perf_counter() - started < BUSY
        return
    assert time.perf_counter() - started < BUSY
    for token in tokenizer().encode("ab" * 150, add_special_tokens=False):
        before = time.perf_counter()
        if masks_of([guide]) is None:
            break
        guide.accept(token)
        slowest = max(slowest, time.perf_counter() - before)
    assert slowest < 1


def test_a_vocabulary_that_is_larger_than_the_tokenizers_is_never_used() -> None:
    wide = Guides(tokenizer(), VOCABULARY + 100)
    masks = masks_of([wide.guide(Structure.json())])
    assert isinstance(masks, Masks) and masks.bits.shape == (
        1,
        (VOCABULARY + 131) // 32,
    )
    logits = np.zeros((1, VOCABULARY + 100), np.float32)
    assert not np.isfinite(apply_masks(logits, masks)[0, VOCABULARY:]).any()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ["<tool_call>", "<|mark|>", "[MARK]", "zqzq"])
def test_a_text_that_spells_an_added_token_can_be_written(
    tmp_path: Path, name: str, special: bool
) -> None:
    """The tokenizer reads it as that token, which llguidance may take for special and
    then not for the text."""
    backend = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(name, special=special)])
    backend.save(str(tmp_path / "tokenizer.json"))
    own = Tokenizer(tmp_path)
    assert own.encode(name) == [VOCABULARY]
    assert written(own, VOCABULARY + 1, f"a{name}b") == f"a{name}b"


@pytest.mark.parametrize("form", ["pairs", "strings"])
@pytest.mark.parametrize("name", ["agn", "ag"])
def test_a_text_that_spells_a_token_that_merges_make_can_be_written(
    tmp_path: Path, name: str, form: str
) -> None:
    """A name of the vocabulary that is special is built by a merge, or used by one."""
    marked_folder(tmp_path, name)
    if form == "strings":
        path = tmp_path / "tokenizer.json"
        said = json.loads(path.read_text("utf-8"))
        said["model"]["merges"] = [" ".join(one) for one in said["model"]["merges"]]
        path.write_text(json.dumps(said), "utf-8")
    own = Tokenizer(tmp_path)
    assert own.encode(name)[0] in own.marks and own.encode(name)[0] < VOCABULARY
    assert written(own, VOCABULARY, f"x{name}b") == f"x{name}b"


SMALL = {name: i for i, name in enumerate(["[UNK]", "a", "g", "n", "##g", "##n", "ag"])}
MODELS: dict[str, Callable[[], tokenizers.models.Model]] = {
    "unigrams": lambda: tokenizers.models.Unigram(
        [("[UNK]", 0.0), ("a", -1.0), ("g", -1.0), ("n", -1.0), ("agn", -0.5)], unk_id=0
    ),
    "words' pieces": lambda: tokenizers.models.WordPiece(
        {**SMALL, "agn": len(SMALL)}, unk_token="[UNK]"
    ),
    "merges of pieces": lambda: tokenizers.models.BPE(
        {**SMALL, "agn": len(SMALL)},
        [("a", "##g"), ("ag", "##n")],
        continuing_subword_prefix="##",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokenizers_of_every_kind_are_read_with_a_mark_of_their_own(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = tokenizers.Tokenizer(MODELS[name]())
    backend.decoder = tokenizers.decoders.ByteFallback()
    backend.add_special_tokens(["agn"])
    backend.save(str(tmp_path / "tokenizer.json"))
    own = Guides(Tokenizer(tmp_path), backend.get_vocab_size())
    assert own.guide(Structure.choice(["ag"])).asks and not caplog.messages


def test_a_tokenizer_that_is_not_read_with_other_names_is_read_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def named(model: dict[str, object], names: Mapping[str, str]) -> dict[str, object]:
        return {**model, "vocab": {}} if names else model

    monkeypatch.setattr(walked, "named", named)
    marked_folder(tmp_path, "agn")
    assert written(Tokenizer(tmp_path), VOCABULARY, "xb") == "xb"
    assert "does not read the tokenizer with other names" in caplog.text


def marked_folder(folder: Path, name: str) -> None:
    """A tokenizer of which an entry of the vocabulary is special."""
    backend = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    backend.add_special_tokens([name])
    backend.save(str(folder / "tokenizer.json"))


def written(own: Tokenizer, vocabulary: int, text: str) -> str:
    """The text that a guide lets an answer write, where it lets it write one."""
    guide = Guides(own, vocabulary).guide(Structure.choice([text]))
    ids: list[int] = []
    while guide.asks:
        bits = no_bits(1, vocabulary)
        guide.fill(bits)
        ids.append(
            int(
                np.flatnonzero(np.unpackbits(bits.view("uint8"), bitorder="little"))[-1]
            )
        )
        guide.accept(ids[-1])
        assert guide.failure is None
    return own.decode([one for one in ids if one not in own.eos_ids])


def test_blanks_between_parts_of_json_come_to_an_end() -> None:
    guide = guides().guide(Structure.json())
    blanks = tokenizer().encode("{ ", add_special_tokens=False)
    for token in blanks:
        guide.accept(token)
    pieces = [tokenizer().piece(token) for token in allowed(guide)]
    assert pieces and all(piece.strip() for piece in pieces)
    assert json.loads("{ }") == {}


def test_tokens_that_the_model_never_says_end_no_structure(tmp_path: Path) -> None:
    """Ends and added tokens beside the rows of the embedding are as if they were not
    there."""
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    settings = {"extra_special_tokens": ["<|beyond|>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = {"eos_token_id": [9999, *tokenizer().eos_ids, VOCABULARY]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    beyond = Tokenizer(tmp_path)
    assert beyond.encode("<|beyond|>") == [VOCABULARY]
    choice = Structure.choice(["ab", "a"])
    found, expected = Guides(beyond, VOCABULARY).guide(choice), guides().guide(choice)
    for token in tokenizer().encode("a"):
        assert allowed(found) == allowed(expected)
        found.accept(token)
        expected.accept(token)
    assert allowed(found) == allowed(expected) and found.failure is None


@pytest.mark.parametrize(
    ("noted", "plain"),
    [
        ({"type": "string", "format": "password"}, {"type": "string"}),
        (
            {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False},
            {"type": "array", "items": {"type": "boolean"}},
        ),
        (
            {
                "type": "object",
                "properties": {"format": {"type": "string", "format": "regex"}},
                "required": ["format"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"format": {"type": "string"}},
                "required": ["format"],
                "additionalProperties": False,
            },
        ),
        ({"anyOf": [{"type": "string", "format": "path"}]}, {"type": "string"}),
    ],
)
def test_keys_of_a_schema_that_are_notes_change_no_answer(
    noted: dict[str, object], plain: dict[str, object]
) -> None:
    found = guides().guide(Structure.json(noted))
    expected = guides().guide(Structure.json(plain))
    for token in tokenizer().encode('{"format": "a"}'):
        assert allowed(found) == allowed(expected)
        if token not in allowed(found):
            break
        found.accept(token)
        expected.accept(token)


def test_values_of_a_schema_are_no_notes() -> None:
    value = {"format": "password", "uniqueItems": False}
    guide = guides().guide(Structure.json({"const": value}))
    for token in tokenizer().encode(json.dumps(value)):
        assert token in allowed(guide)
        guide.accept(token)
    assert guide.stopped or allowed(guide) & set(tokenizer().eos_ids)


LAST = (1 << 63) - 1024
"""The last double of 64 bits."""


def accepts(schema: dict[str, object], value: object) -> bool:
    return takes(guides().guide(Structure.json(schema)), json.dumps(value))


def takes(guide: Guide, text: str) -> bool:
    for token in tokenizer().encode(text, add_special_tokens=False):
        if not guide.asks or token not in allowed(guide):
            return False
        guide.accept(token)
    return guide.stopped or bool(allowed(guide) & set(tokenizer().eos_ids))


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (
            {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
            (LAST, -LAST, 0, 1947123456789012345),
            (1 << 63, -(1 << 63) - 1),
        ),
        ({"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}, (LAST,), (-1,)),
        (
            {"type": "integer", "maximum": (1 << 60) + 1},
            ((1 << 60), -5),
            ((1 << 60) + 2,),
        ),
        ({"type": "number", "maximum": 1e20}, (0.5, LAST), (10**21,)),
        ({"const": 1 << 60}, (1 << 60,), ((1 << 60) + 1,)),
        ({"enum": [[9007199254740991], 0.1]}, ([9007199254740991], 0.1), ([1],)),
    ],
)
def test_numbers_of_many_digits_are_held_to_their_bounds(
    schema: dict[str, object], inside: tuple[object, ...], outside: tuple[object, ...]
) -> None:
    """llguidance reads them as doubles."""
    assert [accepts(schema, value) for value in inside] == [True] * len(inside)
    assert not any(accepts(schema, value) for value in outside)


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_seventeen_digits_take_what_is_inside_and_nothing_beyond(
    name: str,
) -> None:
    """The doubles beside each bound, and the bound itself."""
    random = np.random.default_rng(BOUNDS.index(name))
    lower, strict = name in LOWER, name.startswith("exclusive")
    values = (random.uniform(-9, 9, 20) * 10.0 ** random.integers(-2, 9, 20)).tolist()
    for value in [1.2088995980580641, *values]:
        sides = (math.nextafter(value, math.inf), math.nextafter(value, -math.inf))
        inside, outside = sides if lower else sides[::-1]
        guide = guides().guide(Structure.json({"type": "number", name: value}))
        # llguidance takes a decimal whose digits begin a bound's with zeros behind them.
        texts = repr(inside), f"{inside!r}000"
        assert any(takes(guide.copy(), text) for text in texts), value
        assert takes(guide.copy(), repr(value)) is not strict, value
        assert not takes(guide.copy(), repr(outside)), value


def test_a_value_of_seventeen_digits_is_taken_and_no_double_beside_it() -> None:
    random = np.random.default_rng(5)
    values = (random.uniform(-9, 9, 20) * 10.0 ** random.integers(-2, 9, 20)).tolist()
    for value in [0.30000000000000004, 0.43126050085335277, *values]:
        guide = guides().guide(Structure.json({"enum": [{"a": [value]}, value]}))
        for text in ('{"a": [%r]}', "%r"):
            assert takes(guide.copy(), text % value), value
            for end in (math.inf, -math.inf):
                assert not takes(guide.copy(), text % math.nextafter(value, end)), value


def test_a_tools_arguments_have_values_of_seventeen_digits() -> None:
    calls = Calls(begin="", head="", tail="", between="", end="", most=1)
    tools = {"f": {"type": "number", "const": 0.43126050085335277}}
    guide = guides().guide(Structure.calls(calls, tools))
    assert takes(guide, "0.43126050085335277")


@pytest.mark.parametrize("value", [(1 << 60) + 1, 10**20, 7.3127151177519755e-06])
def test_values_that_a_double_would_round_are_refused(value: float) -> None:
    for schema in ({"const": value}, {"items": {"enum": [1, {"a": [value]}]}}):
        with pytest.raises(KvlatheError, match="too many digits: round it"):
            guides().guide(Structure.json(schema))
    with pytest.raises(KvlatheError, match="as far as numbers are counted"):
        guides().guide(Structure.json({"type": "integer", "minimum": 1 << 70}))
    with pytest.raises(KvlatheError, match="too many digits: round 5e-324"):
        guides().guide(Structure.json({"type": "number", "minimum": 5e-324}))


def test_names_by_a_pattern_are_refused_where_one_could_come_twice() -> None:
    named = {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "integer"}}}
    for schema in (named, {"type": "array", "items": named}):
        with pytest.raises(KvlatheError, match="could give a name twice"):
            guides().guide(Structure.json(schema))
    one = named | {"maxProperties": 1, "additionalProperties": False}
    assert guides().guide(Structure.json(one)).asks
