"""Guides of answers that think first, token by token, and least lengths."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.text.guide import Guides
from kvlathe.runtime.text.masks import Guide, after, no_bits
from kvlathe.runtime.text.masks import allowed as fitting
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.structure import Structure, ThoughtForm
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.runtime_cases import MODEL, llm

pytest.importorskip("llguidance", reason="llguidance is not installed")
VOCABULARY = 8192
OBJECT = Structure.json(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


@cache
def guides() -> Guides:
    return Guides(tokenizer(), VOCABULARY)


def allowed(guide: Guide) -> set[int] | None:
    """The tokens that may come next; None for any."""
    if not guide.asks:
        return None
    bits = no_bits(1, guide.vocabulary)
    guide.fill(bits)
    words = bits.view("uint32")[0]
    return {
        token
        for token in range(guide.vocabulary)
        if words[token // 32] >> token % 32 & 1
    }


def walked(guide: Guide, ids: list[int]) -> None:
    """Go along tokens that the guide must allow."""
    for token in ids:
        left = allowed(guide)
        assert left is None or token in left
        guide.accept(token)
        assert guide.failure is None


def encoded(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("seed", range(6))
def test_a_copy_goes_its_own_way_and_allows_what_its_mask_does(seed: int) -> None:
    """Along random tokens: a structure, thoughts before it, and a least length."""
    chance = random.Random(seed)
    form = ThoughtForm("<think>", "</think>", inside=chance.choice([True, None]))
    structure = chance.choice([OBJECT, Structure.after_thoughts(form, OBJECT)])
    guide = guides().guide(structure)
    if chance.random() < 0.5:
        guide = guides().least(9, [*tokenizer().eos_ids], guide)
    walk = [*encoded("</think>")] if structure is not OBJECT and form.inside else []
    for _ in range(25):
        left = allowed(guide)
        if guide.stopped or left is None:
            break
        some = chance.sample(range(VOCABULARY), 20) + chance.sample(sorted(left), 1)
        assert [guide.allows(one) for one in some] == [one in left for one in some]
        token = walk.pop(0) if walk else some[-1]
        after(guide, [token])
        assert allowed(guide) == left
        assert fitting(guide, [token]) == 1
        wrong = [one for one in some if one not in left]
        assert not wrong or fitting(guide, [*wrong, token]) == 0
        guide.accept(token)


@pytest.mark.parametrize("inside", [True, None])
@pytest.mark.parametrize("between", ["", "\n\n", " "])
def test_an_answer_thinks_and_then_has_its_structure(
    inside: bool | None, between: str
) -> None:
    form = ThoughtForm("<think>", "</think>", inside=inside)
    guide = guides().guide(Structure.after_thoughts(form, OBJECT))
    ends = {*tokenizer().eos_ids}
    for text in ("" if inside else "<think>", 'A {"a": x} < b, maybe', "</think>"):
        for token in encoded(text):
            left = allowed(guide)
            assert left is not None and token in left and not left & ends
            guide.accept(token)
    walked(guide, encoded(between))
    first = allowed(guide)
    assert first is not None and encoded("{")[0] in first
    assert encoded("x")[0] not in first
    walked(guide, encoded('{"a": 12}'))
    assert guide.stopped or allowed(guide) == ends


def test_an_answer_may_leave_thoughts_out_where_it_begins_them_itself() -> None:
    form = ThoughtForm("<think>", "</think>")
    guide = guides().guide(Structure.after_thoughts(form, OBJECT))
    first = allowed(guide)
    assert first is not None and encoded("<think>")[0] in first
    walked(guide, encoded('{"a": 1}'))
    assert guide.stopped or allowed(guide) == {*tokenizer().eos_ids}


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("then", [OBJECT, None])
def test_thoughts_beyond_their_budget_are_ended(
    budget: int, then: Structure | None
) -> None:
    form = ThoughtForm("<think>", "</think>", "\n", inside=True, budget=budget)
    guide = guides().guide(Structure.after_thoughts(form, then))
    for token in encoded("word " * 9)[:budget]:
        left = allowed(guide)
        assert (left is None) == (then is None)
        guide.accept(token)
    for token in [*encoded("</think>"), *encoded("\n")]:
        assert allowed(guide) == {token}
        guide.accept(token)
    if then is None:
        assert allowed(guide) is None and not guide.stopped
    else:
        walked(guide, encoded('{"a": 1}'))


def test_walks_by_chance_have_thoughts_and_a_structure() -> None:
    """Whatever is drawn of what is allowed, the text is thoughts and an object."""
    form = ThoughtForm("<think>", "</think>", inside=True, budget=6)
    for seed in range(20):
        guide = guides().guide(Structure.after_thoughts(form, OBJECT))
        ids: list[int] = []
        draw = random.Random(seed)
        while not guide.stopped and len(ids) < 80:
            left = allowed(guide)
            assert left
            ids.append(draw.choice(sorted(left)))
            guide.accept(ids[-1])
            assert guide.failure is None
        said = b"".join(map(tokenizer().piece, ids)).decode(errors="replace")
        found = json.loads(said.rpartition("</think>")[2].removesuffix("<|endoftext|>"))
        assert 0 <= found["a"] <= 99


@cache
def special(folder: Path) -> Tokenizer:
    """The shipped tokenizer with Harmony's tokens in the place of its last ones."""
    backend = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    backend.add_special_tokens([*MARKS])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize("thinks", [True, False])
def test_messages_of_harmony_come_before_a_structure(
    tmp_path: Path, thinks: bool
) -> None:
    own = special(tmp_path)
    size = own.backend.get_vocab_size(with_added_tokens=True)
    final = "<|start|>assistant<|channel|>final<|message|>"
    form = ThoughtForm(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        final,
        final.removeprefix("<|start|>assistant"),
    )
    guide = Guides(own, size).guide(Structure.after_thoughts(form, OBJECT))
    before = (
        f"<|channel|>analysis<|message|>Hm.<|end|>{final}" if thinks else form.instead
    )
    walked(guide, own.encode(before + '{"a": 1}', add_special_tokens=False))
    assert guide.stopped or allowed(guide) == {*own.eos_ids}


def test_a_form_of_thoughts_that_cannot_be_read_is_refused() -> None:
    for text in ("x", "{}", '{"form": {}, "then": null}', '{"form": [], "then": 1}'):
        with pytest.raises(KvlatheError, match="form of thoughts"):
            Structure("thoughts", text)


@pytest.mark.parametrize("least", [1, 5, 40])
def test_no_answer_ends_before_its_least_length(least: int) -> None:
    """Though its end is the likeliest all the time: it comes as soon as it may."""
    engine = llm("torch", "split")
    [end, *_] = engine.tokenizer.eos_ids
    asked: Any = {"logit_bias": ((end, 100.0),), "max_new_tokens": 60}
    [found] = engine.generate(["def"], SamplingParams(min_tokens=least, **asked))
    assert len(found.token_ids) == least + 1 and found.token_ids[-1] == end


def test_a_stop_string_counts_behind_the_least_length() -> None:
    engine = llm("torch", "split")
    [whole] = engine.generate(["def"], SamplingParams(max_new_tokens=30))
    stop = whole.text[2:4]
    asked: Any = {"max_new_tokens": 30, "stop": stop}
    [soon] = engine.generate(["def"], SamplingParams(**asked))
    [late] = engine.generate(["def"], SamplingParams(min_tokens=12, **asked))
    assert len(soon.token_ids) < 12 <= len(late.token_ids)
    assert whole.text.startswith(late.text) and stop in late.text


def test_a_structure_may_end_before_the_least_length() -> None:
    engine = llm("torch", "split")
    params = SamplingParams(
        max_new_tokens=30, min_tokens=20, structure=Structure.choice(["yes", "no"])
    )
    [found] = engine.generate(["def"], params)
    assert found.text in ("yes", "no") and found.finish_reason == "stop"
