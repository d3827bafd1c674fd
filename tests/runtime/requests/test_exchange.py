"""Laws of pages that travel: a prefix or a sequence goes on elsewhere as if it had never
left, to the bit; what is of another build or damaged is refused, and takes no page."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.cache.arena import OutOfPages
from kvlathe.runtime.cache.hot_rows import HotRows
from kvlathe.runtime.cache.parcel import FORM, Origin, history_of, pack, unpack
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.held_pages import Arrival, Departure
from kvlathe.runtime.requests.request import Request
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.fake_session import SamplesThere
from tests.support.moved_pages import copied
from tests.support.nightly import rest_nightly
from tests.support.prefix_cases import forget, prefixes, sharing
from tests.support.runtime_cases import LIMITS, RANKED, llm, model_shape, plans, text

LAYOUTS = {kind: CacheLayout(plan) for kind, plan in plans(model_shape()).items()}
SHARED = (
    "one",
    "split",
    "sealed",
    "sealed after",
    "sealed split",
    "coded",
    "windowed",
    "sealed windows",
    "aged",
    "aged windows",
)
SAMPLED = SamplingParams(
    max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=7, logprobs=2
)
LONG = dataclasses.replace(SAMPLED, max_new_tokens=90)
ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


def moved(
    source: LLM, prompt: list[int], after: int, params: SamplingParams = SAMPLED
) -> Departure:
    """A sequence of ``source`` that has given ``after`` tokens or a few more."""
    ready = threading.Event()
    sequence = source.sequence(list(prompt), params)

    def told(_: object) -> None:
        if sequence.answered >= after:
            ready.set()

    source.thread.submit([sequence], told)
    assert ready.wait(60)
    departure = source.exchange.export_sequence(sequence)
    assert departure is not None and sequence.finish_reason == "moved"
    return departure


def finished(target: LLM, arrival: Arrival) -> Request:
    request = target.exchange.adopt_sequence(arrival)
    target.thread.wait(request)
    return request


def checked(source: LLM, departure: Departure, target: LLM) -> Arrival:
    arrival = copied(source, departure, target)
    arrival.check()
    return arrival


KINDS = (*SHARED, *RANKED, "mixed")
WITHIN_A_PAGE = ("one", "sealed windows", "sealed budget", "mixed")
"""Kinds that move before a page is full; the others move when some are. Each does both,
nightly."""
MOVED = rest_nightly(
    itertools.product((37, 700), KINDS),
    *((37 if kind in WITHIN_A_PAGE else 700, kind) for kind in KINDS),
)


@pytest.mark.parametrize(("length", "kind"), MOVED)
def test_a_sequence_goes_on_elsewhere_as_if_it_had_not_moved(
    kind: str, length: int
) -> None:
    prompt = list(text(length))
    with llm("torch", kind) as source, llm("torch", kind) as target:
        expected = source.generate([prompt], SAMPLED)[0]
        with moved(source, prompt, 9) as departure:
            arrival = target.exchange.unpack(departure.packed())
        assert source.pool.bytes_in_use == 0
        [sequence] = finished(target, arrival).sequences
        assert sequence.answer == expected.token_ids
        assert sequence.logprobs == expected.logprobs
        assert sequence.text and sequence.text.text == expected.text
        assert target.pool.bytes_in_use == 0


@cache
def pair(kind: str) -> tuple[LLM, LLM]:
    return sharing(kind), sharing(kind)


@pytest.mark.slow
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(
    st.sampled_from(["one", "sealed split", "sealed windows"]),
    st.integers(1, 900),
    st.integers(1, 30),
    st.integers(1, 900),
)
def test_any_length_moves_at_any_time(
    kind: str, length: int, after: int, shared: int
) -> None:
    """From pages that it shares with a prefix there. Steps have the same shapes in both
    runs: else numbers differ by rounding. The answer is too long to end before it is
    exported."""
    source, target = pair(kind)
    prompt = list(text(length))
    begun = prompt[:shared]
    for engine in (source, target):
        engine.generate([begun], ONE)
    expected = source.generate([prompt], LONG)[0].token_ids
    forget(source)
    source.generate([begun], ONE)
    with moved(source, prompt, after, LONG) as departure:
        arrival = target.exchange.unpack(departure.packed())
    assert finished(target, arrival).sequences[0].answer == expected
    for engine in (source, target):
        forget(engine)


@pytest.mark.parametrize("kind", ["one", "sealed"])
def test_a_sequence_moves_while_its_next_token_is_being_chosen(kind: str) -> None:
    """As on a GPU: a step is in flight when it is exported."""
    prompt = list(text(100))
    with llm("torch", kind) as source, llm("torch", kind) as target:
        expected = source.generate([prompt], SAMPLED)[0].token_ids
        for engine in (source, target):
            engine.engine.session = SamplesThere(engine.session)
        with moved(source, prompt, 4) as departure:
            arrival = target.exchange.unpack(departure.packed())
        assert source.pool.bytes_in_use == 0
        assert finished(target, arrival).sequences[0].answer == expected


@pytest.mark.parametrize(
    ("kind", "whole"),
    rest_nightly(
        itertools.product(["sealed split", "windowed", "budget"], [False, True]),
        ("sealed split", True),
        ("windowed", True),
        ("budget", False),
    ),
)
def test_pages_go_from_pool_to_pool_without_a_copy_between(
    kind: str, whole: bool
) -> None:
    """``whole``: the last page, which is filled in part, too."""
    prompt = list(text(300))
    with llm("torch", kind) as source, llm("torch", kind) as target:
        expected = source.generate([prompt], SAMPLED)[0]
        other = target.exchange  # pages lie elsewhere than in the source
        held = target.pool.take([1] * len(target.pool.strides))
        sequence = source.sequence(list(prompt), SAMPLED)
        departure = source.exchange.prefill(sequence, whole)
        assert departure is not None and other.memory.device == "cpu"
        assert any(departure.parcel.rows) != whole
        with departure:
            arrival = checked(source, departure, target)
        [sequence] = finished(target, arrival).sequences
        assert sequence.answer == expected.token_ids
        target.pool.drop(held)
        assert source.pool.bytes_in_use == target.pool.bytes_in_use == 0


@pytest.mark.parametrize(
    "kind", rest_nightly(SHARED, "split", "sealed split", "sealed windows")
)
def test_a_prefix_is_found_where_it_was_adopted(kind: str) -> None:
    prompt = list(text(1100))
    source, target = sharing(kind), sharing(kind)
    expected = source.generate([prompt], SAMPLED)[0]
    with source.exchange.export_prefix(prompt) as departure:
        count = departure.parcel.cached
        arrival = target.exchange.unpack(departure.packed())
    assert count >= 1024 and not any(departure.parcel.rows)
    assert target.exchange.adopt_prefix(arrival) == count
    assert target.generate([prompt], SAMPLED)[0].token_ids == expected.token_ids
    assert prefixes(target).hits == count
    for engine in (source, target):
        forget(engine)


@pytest.mark.slow
def test_a_compacted_prefix_is_found_where_it_was_adopted() -> None:
    kind, prompt = "compacted", list(text(300))
    source = sharing(kind, backend="onnxruntime")
    target = sharing(kind, backend="onnxruntime")
    source.compact(prompt[:256])
    expected = source.generate([prompt], SAMPLED)[0]
    with source.exchange.export_prefix(prompt) as departure:
        assert departure.parcel.base is not None
        arrival = target.exchange.unpack(departure.packed())
    count = target.exchange.adopt_prefix(arrival)
    assert target.generate([prompt], SAMPLED)[0].token_ids == expected.token_ids
    assert prefixes(target).hits == count >= 256
    for engine in (source, target):
        forget(engine)


def test_a_prefix_is_its_tenants_alone() -> None:
    prompt = list(text(200))
    source, target = sharing("one"), sharing("one")
    source.generate([prompt], SAMPLED)
    with source.exchange.export_prefix(prompt) as departure:
        arrival = target.exchange.unpack(departure.packed())
    target.exchange.adopt_prefix(arrival, b"tenant")
    assert target.exchange.export_prefix(prompt, b"tenant").parcel.cached == 192
    with pytest.raises(KvlatheError, match="none is cached"):
        target.exchange.export_prefix(prompt)
    with pytest.raises(KvlatheError, match="none is cached"):
        source.exchange.export_prefix(prompt, b"tenant")


def test_a_moved_sequence_streams_only_what_was_not_streamed() -> None:
    prompt = list(text(90))
    with llm("torch", "sealed") as source, llm("torch", "sealed") as target:
        expected = source.generate([prompt], SAMPLED)[0]
        with moved(source, prompt, 5) as departure:
            before = len(departure.parcel.tokens) - len(prompt)
            arrival = target.exchange.unpack(departure.packed())
        heard: list[int] = []
        request = target.exchange.adopt_sequence(
            arrival, on_delta=lambda delta: heard.extend(delta.token_ids)
        )
        assert request.done.wait(60)
        assert heard == expected.token_ids[before:] and before >= 5


def test_an_answer_that_ends_at_once_has_nothing_to_hand_over() -> None:
    with llm("torch", "one") as engine:
        short = engine.sequence(list(text(20)), SamplingParams(max_new_tokens=1))
        assert engine.exchange.prefill(short) is None
        assert short.answered == 1 and engine.pool.bytes_in_use == 0


def test_pages_of_a_sequence_that_waits_make_room_for_others() -> None:
    """An adopted sequence has its pages before its turn. Who needs them gets them, and
    it still ends as it would have."""
    prompt, limits = list(text(200)), dataclasses.replace(LIMITS, max_batch_size=1)
    with llm("torch", "sealed") as source:
        expected = source.generate([prompt], SAMPLED)[0].token_ids
        departure = moved(source, prompt, 3)
        data = departure.packed()
    with llm("torch", "sealed", limits=limits) as target:
        long = SamplingParams(max_new_tokens=2000, ignore_eos=True)
        running = target.thread.submit([target.sequence(list(text(20)), long)])
        request = target.exchange.adopt_sequence(target.exchange.unpack(data))
        [waiting] = request.sequences

        def fill() -> int:
            taken: list[list[list[int]]] = []
            before = len(waiting.table.pages[1])
            with pytest.raises(OutOfPages):
                while True:
                    taken.append(target.pool.take([1] * len(target.pool.strides)))
            for pages in taken:
                target.pool.drop(pages)
            return before

        assert target.thread.call(fill) > 0
        assert not any(waiting.table.pages) and waiting.cached
        target.thread.cancel(running)
        target.thread.wait(request)
        assert waiting.answer == expected
        assert target.pool.bytes_in_use == 0


# -- what is refused -------------------------------------------------------------------
@pytest.fixture(scope="module")
def packed() -> bytes:
    with llm("torch", "sealed") as source:
        departure = source.exchange.prefill(source.sequence(list(text(150)), SAMPLED))
        assert departure is not None
        with departure:
            return departure.packed()


def changed(packed: bytes, change: Callable[[dict], None]) -> bytes:
    """With another description, signed as it should be, and bytes for its pages."""
    said, body = unpack(packed)
    fields = json.loads(said)
    change(fields)
    wanted = sum(map(sum, fields["listed"]["sizes"]))
    return b"".join(pack(json.dumps(fields), [[body[:wanted]]]))


def test_pages_of_another_build_are_refused(packed: bytes) -> None:
    with (
        llm("torch", "sealed split") as target,
        pytest.raises(KvlatheError, match=r"another plan.*engine's is.*same build"),
    ):
        target.exchange.unpack(packed)
    with llm("torch", "sealed") as target:
        target.exchange.origin = Origin(target.plan.digest, "0" * 64, FORM)
        with pytest.raises(KvlatheError, match=r"other weights.*Send them"):
            target.exchange.unpack(packed)
        assert target.pool.bytes_in_use == 0


def test_pages_of_another_version_are_refused(packed: bytes) -> None:
    """By their first bytes, and by the description, which may come without them."""
    older = packed.replace(f"pages {FORM}".encode(), b"pages 1", 1)
    named = changed(packed, lambda x: x["listed"]["origin"].update(form=2))
    silent = changed(packed, lambda x: x["listed"]["origin"].pop("form"))
    with llm("torch", "sealed") as target:
        for data in (older, named, silent):
            with pytest.raises(
                KvlatheError, match=r"another version.*same version on both"
            ):
                target.exchange.unpack(data)
        assert target.pool.bytes_in_use == 0


@settings(max_examples=60)
@given(data=st.data())
def test_bytes_that_were_damaged_are_refused(
    packed: bytes, data: st.DataObject
) -> None:
    target = _target()
    at = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        wrong = packed[:at]
    else:
        flipped = packed[at] ^ data.draw(st.integers(1, 255))
        wrong = packed[:at] + bytes([flipped]) + packed[at + 1 :]
    with pytest.raises(KvlatheError, match="parcel"):
        target.exchange.unpack(wrong)
    assert target.pool.bytes_in_use == 0


FORGED: dict[str, Callable[[dict], None]] = {
    "more cached than known": lambda x: x.update(cached=10**6),
    "longer than cached": lambda x: x["lengths"].__setitem__(0, 10**6),
    "fewer buckets": lambda x: x.update(ids=x["ids"][:1]),
    "more buckets": lambda x: x["lengths"].append(1) or x["rows"].append(""),
    "a page too many": lambda x: x["ids"][1].append(0),
    "smaller pages": lambda x: x["listed"]["sizes"][1].__setitem__(0, 5),
    "coded": lambda x: x["listed"].update(coding="zstd"),
    "rows that are none": lambda x: x.update(rows=["*", ""]),
    "too few rows": lambda x: x.update(rows=[base64.b64encode(b"few").decode(), ""]),
    "tokens that are none": lambda x: x.update(history="****"),
    "half a token": lambda x: x.update(history="AAAA"),
    "a field too many": lambda x: x.update(more=1),
    "unknown parameters": lambda x: x["running"].update(params='{"a": 1}'),
    "parameters that are none": lambda x: x["running"].update(params="["),
    "logprobs that are none": lambda x: x["running"].update(logprobs="[1]"),
    "parameters that are nested deep": lambda x: x["running"].update(
        params="[" * 200_000
    ),
    "logprobs that are nested deep": lambda x: x["running"].update(
        logprobs="[" * 200_000
    ),
    "no logprobs": lambda x: x["running"].update(logprobs="[]"),
    "logprobs of words": lambda x: x["running"].update(logprobs='[["a", "b", []]]'),
    "likeliest tokens that are words": lambda x: x["running"].update(
        logprobs='[[1, -1.0, [["a", "b"]]]]'
    ),
    "logprobs nobody asked for": lambda x: x["running"].update(
        prompt_logprobs="[[1, -1.0, []]]"
    ),
    "a prompt longer than all": lambda x: x["running"].update(prompt_tokens=10**6),
    "a seed that is too large": lambda x: x["running"].update(seed=10**30),
    "nothing held": lambda x: x.update(
        lengths=[0, 0],
        rows=["", ""],
        ids=[[], []],
        listed={**x["listed"], "sizes": [[], []], "digests": [[], []]},
    ),
    "nothing arrived": lambda x: x.update(arrived=[0, 0]),
    "a compacted prefix of a plan without": lambda x: x.update(
        base={"cached": 64, "share": 0.5, "lengths": [0, 64], "pages": [0, 1]}
    ),
    "unknown tokens": lambda x: x.update(history=history_of([10**6] * 151)),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_description_is_refused_and_takes_no_page(
    packed: bytes, name: str
) -> None:
    target = _target()
    with pytest.raises(KvlatheError):
        arrival = target.exchange.unpack(changed(packed, FORGED[name]))
        target.exchange.adopt_sequence(arrival)
    assert target.pool.bytes_in_use == 0


def test_pages_that_wait_are_as_many_as_were_sealed() -> None:
    """A length says how many of them queries see, and never more than there are."""
    source, target = sharing("aged"), sharing("aged")
    with moved(source, list(text(700)), 9) as departure:
        packed, lengths = departure.packed(), departure.parcel.lengths
    seen = lengths[2]
    assert seen + 64 <= 64 * len(departure.parcel.ids[2])
    changes: list[Callable[[dict], None]] = [
        lambda x: x["lengths"].__setitem__(2, seen + 64),
        lambda x: x["lengths"].__setitem__(2, seen - 64),
        lambda x: x["arrived"].__setitem__(0, x["arrived"][0] - 64),
    ]
    for change in changes:
        with pytest.raises(KvlatheError, match=r"bucket|tokens"):
            target.exchange.unpack(changed(packed, change))
    assert target.pool.bytes_in_use == 0


def test_a_forged_prefix_is_refused_and_takes_no_page() -> None:
    """With more tokens than it has pages for, its last block would be another's."""
    source, target = sharing("one"), sharing("one")
    source.generate([list(text(600))], ONE)
    with source.exchange.export_prefix(text(600)) as departure:
        packed, tokens = departure.packed(), departure.parcel.tokens
    longer = history_of([*tokens, *range(64)])
    for change in ({"history": longer}, {"cached": 512}):
        with pytest.raises(KvlatheError, match=r"no prefix|more tokens"):
            target.exchange.unpack(changed(packed, lambda x, y=change: x.update(y)))
        assert target.pool.bytes_in_use == 0
    arrival = target.exchange.unpack(packed)
    assert target.exchange.adopt_prefix(arrival) == len(tokens)
    for engine in (source, target):
        forget(engine)


@pytest.mark.slow
def test_a_forged_compacted_prefix_is_refused_and_takes_no_page() -> None:
    kind, prompt = "compacted", list(text(300))
    source = sharing(kind, backend="onnxruntime")
    target = sharing(kind, backend="onnxruntime")
    source.compact(prompt[:256])

    def change(said: dict, field: str) -> None:
        base = said["base"]
        base[field] = 64 if field == "cached" else [0] * len(base[field])

    prefix = source.exchange.export_prefix(prompt)
    running = source.exchange.prefill(source.sequence(list(prompt), SAMPLED))
    assert running is not None
    for departure in (prefix, running):
        with departure:
            packed = departure.packed()
        for field in ("pages", "lengths", "cached"):
            forged = changed(packed, functools.partial(change, field=field))
            with pytest.raises(KvlatheError, match="parcel"):
                target.exchange.unpack(forged)
            assert target.pool.bytes_in_use == 0
        target.exchange.unpack(packed).close()
    for engine in (source, target):
        forget(engine)


def test_a_prefix_is_no_sequence_and_a_sequence_no_prefix(packed: bytes) -> None:
    target = sharing("sealed")
    with pytest.raises(KvlatheError, match="it is a sequence"):
        target.exchange.adopt_prefix(target.exchange.unpack(packed))
    target.generate([list(text(600))], SAMPLED)
    with target.exchange.export_prefix(text(600)) as departure:
        arrival = target.exchange.unpack(departure.packed())
    with pytest.raises(KvlatheError, match="it holds a prefix"):
        target.exchange.adopt_sequence(arrival)
    forget(target)


def test_an_engine_without_sharing_says_so() -> None:
    with (
        llm("torch", "one") as engine,
        pytest.raises(KvlatheError, match="without sharing"),
    ):
        engine.exchange.export_prefix(text(64))


_TARGETS: list[LLM] = []


def _target() -> LLM:
    if not _TARGETS:
        _TARGETS.append(llm("torch", "sealed"))
    return _TARGETS[0]


# -- rows ------------------------------------------------------------------------------
places = st.sampled_from(
    [(kind, b) for kind, x in LAYOUTS.items() for b in range(len(x.page_stride))]
)


@settings(max_examples=60)
@given(places, st.integers(1, 63), st.integers(0, 99))
def test_rows_of_a_page_hold_its_tokens_and_nothing_else(
    place: tuple[str, int], tokens: int, seed: int
) -> None:
    """Two pages that differ behind the first tokens have the same rows, and rows make
    a page with the same rows."""
    kind, bucket = place
    layout = LAYOUTS[kind]
    rows = HotRows(layout)
    size = layout.page_stride[bucket]
    page = np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()
    if not rows.cut(bucket, tokens):
        return
    taken = rows.take(bucket, page, tokens)
    made = rows.page(bucket, taken, tokens)
    assert rows.take(bucket, made, tokens) == taken
    assert len(taken) == rows.size(bucket, tokens) < size
    whole = rows.size(bucket, layout.plan.page_tokens)
    assert whole <= size
