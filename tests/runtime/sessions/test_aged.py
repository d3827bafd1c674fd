"""Laws of tiers by age: newest pages in one format, older ones in another, and each token
read once."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from kvlathe.plan.codec import matrices
from kvlathe.plan.lives import Age
from kvlathe.runtime.scheduling.prompt import Whole
from kvlathe.runtime.scheduling.sequence import PrefillChunk, Sequence
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.runtime.sessions.test_seal import Floats, fitted, quantized
from tests.support.runtime_cases import (
    BACKENDS,
    forced,
    llm,
    model_shape,
    plans,
    text,
)

PAGE = 64
SCHEDULES = [[(1, 64, 64)] * 5, [(64, 0, 300), (64, 64, 0), (22, 70, 1), (0, 66, 19)]]


def assert_same(logits: Floats, expected: Floats) -> None:
    """Equal but for the rare number on the border of two codes, which float noise sends
    to either side: of 4 bits that is 16 times as much as of 8."""
    difference = np.abs(logits - expected)
    assert np.sqrt((difference**2).mean()) < 2e-3 and difference.max() < 0.1


@cache
def by_age(length: int) -> Floats:
    """Logits of the engine that seals nothing, page by page. Before each page its full
    pages are written anew: by the element-wise quantizer, from what was computed, in the
    format of their age."""
    (group,) = plans(model_shape())["aged"].groups
    life = group.life
    assert isinstance(life, Age)
    engine = llm("torch", "one")
    assert isinstance(engine.session, HostPages)
    rows = engine.session.rows[0]
    path = Whole.cut(length, PAGE)
    sequence = Sequence(
        list(text(length)), length, engine.pool.open(), path, Sampler(SamplingParams())
    )
    found: list[Floats] = []
    computed: list[np.ndarray] = []  # full pages
    while sequence.cached < length:
        count = sequence.next_tokens(length)
        reservation = engine.pool.reserve(sequence.table, count)
        chunk = PrefillChunk(sequence, count, reservation, range(count))
        found.append(engine.engine.run([chunk]))
        full = sequence.table.pages[0][: sequence.cached // PAGE]
        computed += [rows[page].copy() for page in full[len(computed) :]]
        for place, page in enumerate(full[life.first // PAGE :], life.first // PAGE):
            age = len(full) - place  # 1: the newest
            young, old = group.cold
            tier = young if age <= life.young // PAGE else old
            for pair in matrices(engine.layout, 0).values():
                for part, form in zip(pair, tier.formats, strict=True):
                    values = part.read(computed[place])
                    if form.coding == "normal":
                        part.write(rows[page], fitted(values, form))
                        continue
                    shape = form.bits, form.axis, form.group
                    part.write(rows[page], quantized(values, *shape)[0])
    return np.concatenate(found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_reads_every_page_in_the_format_of_its_age(backend: str) -> None:
    expected = by_age(330)
    logits = llm(backend, "aged").logits(text(330), range(330))
    assert_same(logits, expected)
    for other in ("sealed after", "fixed"):  # all newest, or all old
        elsewhere = llm("torch", other).logits(text(330), range(260, 330))
        assert np.sqrt(((elsewhere - expected[260:]) ** 2).mean()) > 5e-3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_format_for_all_ages_is_as_if_there_were_none(
    schedule: list[tuple[int, ...]],
) -> None:
    texts = [text(150), text(200, 300), text(320, 700)]
    found, expected = (
        forced(llm("torch", kind), texts, schedule)
        for kind in ("aged alike", "sealed after")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


def test_answers_by_age_do_not_depend_on_neighbours() -> None:
    engine, texts = llm("torch", "aged"), [text(330), text(70, 40), text(400, 300)]
    schedule = [(64, 0, 64), (64, 64, 64), (64, 6, 64), *[(64, 0, 64)] * 4]
    together = forced(engine, texts, schedule)
    for one, found in zip(texts, together, strict=True):
        (alone,) = forced(engine, [one], [(64,)] * 7)
        assert_same(found, alone)


def test_a_token_decoded_by_age_is_that_of_a_grid_of_one_page() -> None:
    """Pages of a chunk that are old at its end were never seen as new."""
    engine = llm("torch", "aged")
    (whole,) = forced(engine, [text(400)], [(64,)] * 7)
    (decoded,) = forced(engine, [text(400)], [(64,)] * 4 + [(1,)] * 144)
    assert_same(decoded, whole)


def test_pages_that_wait_move_with_a_sequence_in_and_out_of_memory() -> None:
    engine = llm("torch", "aged")
    table = engine.pool.open()
    for count in (512, 64, 30):
        engine.pool.commit(engine.pool.reserve(table, count, seal=True))
    before = list(map(len, table.pages)), list(table.lengths)
    assert before == ([2, 2, 8], [64 + 30, 128, 384])
    assert engine.pool.bytes_in_use == engine.layout.bytes_for(606)
    assert isinstance(engine.session, HostPages)
    for b, page in itertools.product((1, 2), range(2)):
        engine.session.rows[b][table.pages[b][-1 - page]] = 10 * b + page
    swapped = engine.pool.swap_out(table, engine.session)
    assert engine.pool.bytes_in_use == 0
    table = engine.pool.swap_in(swapped, engine.session)
    assert (list(map(len, table.pages)), list(table.lengths)) == before
    for b, page in itertools.product((1, 2), range(2)):
        bytes_of = engine.session.rows[b][table.pages[b][-1 - page]]
        assert (bytes_of == 10 * b + page).all()
    engine.pool.release(table)
    assert engine.pool.bytes_in_use == 0
