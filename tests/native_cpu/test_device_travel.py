"""Laws of pages that go by address from one session on a GPU to another, in host
memory: they arrive to the bit, what is damaged is refused, and no step that still runs
reaches them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.page_digest import page_digest
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.parcel import Parcel
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.requests.held_pages import Departure
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.device_engines import in_torch, on_cpu, on_host
from tests.support.moved_pages import copied
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import text
from tests.support.session_laws import device_session
from tests.support.turned_cases import half_engine

ENGINES = {"onnx": on_host, "torch": in_torch}
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)
PROMPT = list(text(300))


@pytest.fixture
def engine() -> tuple[Path, CompressionPlan]:
    """16-bit pages sealed into 8 bit."""
    return half_engine()


def left(source: LLM, whole: bool = False) -> Departure:
    sequence = source.sequence(list(PROMPT), PARAMS)
    departure = source.exchange.prefill(sequence, whole)
    assert departure is not None
    return departure


@pytest.mark.parametrize(
    ("here", "there", "whole"),
    rest_nightly(
        itertools.product(ENGINES, ENGINES, [False, True]),
        *((here, there, here == there) for here in ENGINES for there in ENGINES),
    ),
)
def test_a_sequence_goes_on_in_the_pool_of_another_gpu(
    here: str,
    there: str,
    whole: bool,
    native: Native,
    engine: tuple[Path, CompressionPlan],
) -> None:
    """Sums made on the device and on the host are the same: either side checks the
    other. ``whole``: the last page, too, with whatever is behind its tokens."""
    source, target = ENGINES[here](native, engine), ENGINES[there](native, engine)
    assert ("page_sums" in source.session.capabilities) == (here == "torch")
    memory, session = source.exchange.memory, device_session(source)
    assert (memory.address, memory.size) == (session.pool.address, session.pool.nbytes)
    assert memory.device == session.device.name
    expected = target.generate([PROMPT], PARAMS)[0].token_ids
    held = target.pool.take([3] * len(target.pool.strides))
    with left(source, whole) as departure:
        assert any(departure.parcel.rows) != whole
        arrival = copied(source, departure, target)
        arrival.check()
        pages = zip(departure.parcel.ids, arrival.ids, strict=True)
        for bucket, (sent, arrived) in enumerate(pages):
            for a, b in zip(sent, arrived, strict=True):
                page = target.session.read_page(bucket, b)
                assert page == source.session.read_page(bucket, a)
                assert page_digest(page) in departure.parcel.listed.digests[bucket]
    assert any(arrival.ids)
    request = target.exchange.adopt_sequence(arrival)
    target.thread.wait(request)
    assert request.sequences[0].answer == expected
    target.pool.drop(held)
    assert source.pool.bytes_in_use == target.pool.bytes_in_use == 0


@pytest.mark.parametrize("there", ENGINES)
def test_a_page_with_one_wrong_bit_is_refused(
    there: str, native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    source, target = in_torch(native, engine), ENGINES[there](native, engine)
    with left(source) as departure:
        arrival = copied(source, departure, target)
        arrival.check()
        bucket = max(range(len(arrival.ids)), key=lambda b: len(arrival.ids[b]))
        stride = target.pool.strides[bucket]
        last = arrival.ids[bucket][-1] * stride + stride - 1
        byte = ctypes.c_uint8.from_address(target.exchange.memory.address + last)
        byte.value ^= 128
        place = len(arrival.ids[bucket]) - 1
        with pytest.raises(KvlatheError, match=f"page {place} of bucket {bucket}"):
            arrival.check()
        byte.value ^= 128
        arrival.check()
        arrival.close()
    assert target.pool.bytes_in_use == 0


class Queue:
    """The queue of a GPU that does nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.works: list[Callable[[], object]] = []

    def run(self) -> None:
        while self.works:
            self.works.pop(0)()


def test_a_step_that_still_runs_does_not_reach_pages_that_arrive(
    native: Native,
    engine: tuple[Path, CompressionPlan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pages were another sequence's, which has ended on the host. Its last step is
    queued, and writes to them."""
    source, target = in_torch(native, engine), in_torch(native, engine)
    session = device_session(target)
    address, queue = target.exchange.memory.address, Queue()
    monkeypatch.setattr(session.device, "mark", lambda: queue.run)
    sums = session.row_sums

    def after_the_queue(bucket: int, pages: list[int]) -> Callable[[], object]:
        queue.run()
        return sums(bucket, pages)

    monkeypatch.setattr(session, "row_sums", after_the_queue)
    with left(source) as departure:
        arrival = target.exchange.expect(Parcel.from_json(departure.parcel.to_json()))
        stride = target.pool.strides[1]
        for page in arrival.ids[1]:
            place = address + page * stride
            queue.works.append(partial(ctypes.memset, place, 7, stride))
        assert queue.works
        for piece in arrival.pieces(source.exchange.memory):
            ctypes.memmove(piece.target, piece.source, piece.size)
        arrival.check()
        arrival.close()


def test_a_gpu_and_a_cpu_check_one_anothers_pages(
    native: Native, engine: tuple[Path, CompressionPlan]
) -> None:
    source, target = in_torch(native, engine), on_cpu(native, engine)
    expected = source.generate([PROMPT], PARAMS)[0].token_ids
    with left(source) as departure:
        arrival = target.exchange.unpack(departure.packed())
        arrival.check()
    arrival.close()
    with left(target) as departure:
        arrival = copied(target, departure, source)
        arrival.check()
    request = source.exchange.adopt_sequence(arrival)
    source.thread.wait(request)
    assert len(request.sequences[0].answer) == len(expected)
