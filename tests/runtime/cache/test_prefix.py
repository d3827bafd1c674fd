"""Laws of shared beginnings: the same answers with fewer tokens computed, never another
tenant's pages, no leak."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.prefix_cases import forget, prefixes, sharing
from tests.support.runtime_cases import llm, text

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("one", 640),
        ("split", 640),
        ("sealed", 512),
        ("sealed after", 512),
        ("sealed split", 512),
        ("windowed", 512),
        ("sealed windows", 512),
        ("aged", 512),
        ("aged windows", 512),
    ],
)
def test_a_known_beginning_is_not_computed_again_and_changes_nothing(
    kind: str, shared: int
) -> None:
    engine, prompt = sharing(kind), list(text(700))
    expected = llm("torch", kind).generate([prompt, prompt[:650]], PARAMS)
    first = engine.generate([prompt], PARAMS)[0]
    assert prefixes(engine).hits == 0
    again, shorter = engine.generate([prompt, prompt[:650]], PARAMS)
    assert prefixes(engine).hits == 2 * shared
    assert (
        first.token_ids == again.token_ids == expected[0].token_ids
        and shorter.token_ids == expected[1].token_ids
    )
    forget(engine)


def test_answers_are_remembered_where_nothing_seals() -> None:
    engine, prompt = sharing("one"), list(text(60))
    answer = engine.generate(
        [prompt], SamplingParams(max_new_tokens=80, ignore_eos=True)
    )[0]
    engine.generate([prompt + answer.token_ids], PARAMS)
    assert prefixes(engine).hits == 128
    forget(engine)


def test_a_prompt_that_is_known_to_its_end_still_has_a_token_to_compute() -> None:
    engine, prompt = sharing("one"), list(text(128))
    expected = engine.generate([prompt], PARAMS)[0].token_ids
    assert (
        engine.generate([prompt], PARAMS)[0].token_ids == expected
        and prefixes(engine).hits == 64
    )
    forget(engine)


def test_tenants_do_not_see_each_others_pages() -> None:
    engine, prompt = sharing("one"), list(text(200))
    engine.generate([prompt], PARAMS)
    other = dataclasses.replace(engine.sequence(prompt, PARAMS), salt=b"another")
    engine.engine.scheduler.add(other)
    engine.engine.step()
    assert prefixes(engine).hits == 0
    engine.engine.scheduler.remove(other)
    forget(engine)


def test_remembered_pages_make_room_for_requests() -> None:
    engine, alone = sharing("split", tokens=128), llm("torch", "split")
    for i in range(6):
        prompt = list(text(150, 160 * i))
        assert (
            engine.generate([prompt], PARAMS)[0].token_ids
            == alone.generate([prompt], PARAMS)[0].token_ids
        )
    forget(engine)


def test_keys_stand_for_every_token_before_the_end_of_the_block() -> None:
    engine, prompt = sharing("one"), list(text(200))
    engine.generate([prompt], PARAMS)
    assert prefixes(engine).find([9, *prompt[1:]])[1] == 0
    table, found = prefixes(engine).find([*prompt[:100], 9, *prompt[101:]])
    assert found == 64
    engine.pool.release(table)
    forget(engine)


@pytest.mark.parametrize("kind", ["windowed", "sealed windows", "aged windows"])
def test_a_shared_beginning_ends_where_its_windows_are_known(kind: str) -> None:
    """The pages of old windows are kept at the borders of chunks, so a prompt that
    leaves a longer one in its middle goes on from there."""
    engine, prompt = sharing(kind), list(text(1300))
    other = prompt[:1100] + list(text(200, 3000))
    expected = llm("torch", kind).generate([other, prompt[:600]], PARAMS)
    engine.generate([prompt], PARAMS)
    found = engine.generate([other, prompt[:600]], PARAMS)
    assert prefixes(engine).hits == 1024 + 512
    assert [x.token_ids for x in found] == [x.token_ids for x in expected]
    forget(engine)


def test_a_window_that_is_gone_ends_no_match() -> None:
    """A sequence that has gone on is remembered without the windows on its way."""
    engine, prompt = sharing("windowed"), list(text(1100))
    cache, table = prefixes(engine), engine.pool.open()
    for count in (512, 512, 76):
        engine.pool.commit(engine.pool.reserve(table, count, seal=True))
    cache.add(table, prompt)
    assert cache.find(prompt)[1] == 0
    early = engine.pool.open()
    engine.pool.commit(engine.pool.reserve(early, 512, seal=True))
    cache.add(early, prompt[:512])
    again, found = cache.find(prompt)
    assert found == 512 and again.lengths == engine.pool.layout.all_held(512)
    for one in (table, early, again):
        engine.pool.release(one)
    forget(engine)


class Router:
    """Holds what it is told of, with the tokens from the prompt's begin."""

    def __init__(self) -> None:
        self.held: dict[bytes, list[int]] = {}

    def stored(
        self, key: bytes, before: bytes | None, tokens: Sequence[int], salt: bytes
    ) -> None:
        assert key not in self.held and salt == b""
        self.held[key] = [*(self.held[before] if before else []), *tokens]

    def removed(self, key: bytes) -> None:
        del self.held[key]


@pytest.mark.parametrize("kind", ["one", "sealed", "windowed"])
def test_an_observer_knows_the_blocks_that_are_kept(kind: str) -> None:
    engine = sharing(kind)
    cache, router = prefixes(engine), Router()
    cache.observer = router
    prompt = list(text(1100))
    engine.generate([prompt, prompt[:600], prompt[5:700]], PARAMS)
    assert router.held.keys() == cache._blocks.keys() != set()
    for tokens in router.held.values():
        assert tokens in (prompt[: len(tokens)], prompt[5 : 5 + len(tokens)])
    assert cache.reclaim()
    assert router.held.keys() == cache._blocks.keys()
    cache.observer = None
    forget(engine)
