"""Cold pages: every byte comes back, whatever it was; what nobody encoded is refused; a
sequence that waited on the host goes on as if it had not."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.cache.cold import CodedPages, ColdPages, parts_of
from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.native import coding
from kvlathe.runtime.native.library import Found, Native
from kvlathe.runtime.scheduling.admission import Admission
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.coded_pages import need_coder, numbers_of
from tests.support.runtime_cases import llm, model_shape, plans, text

LAYOUTS = {kind: CacheLayout(plan) for kind, plan in plans(model_shape()).items()}
places = st.sampled_from(
    [(kind, b) for kind, x in LAYOUTS.items() for b in range(len(x.page_stride))]
)


def page_of(size: int, seed: int, most: int) -> bytes:
    """Bytes below ``most``: 1 is all zeros, 256 is noise."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, most, size, np.uint8, endpoint=False).tobytes()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_parts_hold_every_byte_once(kind: str) -> None:
    layout = LAYOUTS[kind]
    for bucket, stride in enumerate(layout.page_stride):
        counts = np.zeros(stride, int)
        for part in parts_of(layout, bucket):
            for matrix in part.matrices:
                counts[numbers_of(part, matrix)] += 1
        assert (counts == 1).all()


@settings(max_examples=60)
@given(places, st.integers(0, 99), st.sampled_from([1, 3, 40, 256]))
def test_a_page_comes_back_to_the_bit(
    place: tuple[str, int], seed: int, most: int
) -> None:
    kind, bucket = place
    layout = LAYOUTS[kind]
    page = page_of(layout.page_stride[bucket], seed, most)
    need_coder()
    codec = CodedPages(layout)
    coded = codec.encode(bucket, page)
    assert codec.decode(bucket, coded) == page
    assert len(coded) <= len(page) + 128
    assert most > 3 or len(coded) < len(page) / 2


@settings(max_examples=100)
@given(places, st.data())
def test_bytes_that_nobody_encoded_are_refused_or_are_a_page(
    place: tuple[str, int], data: st.DataObject
) -> None:
    """Bytes that were changed or cut never end the process, nor give another size."""
    kind, bucket = place
    layout = LAYOUTS[kind]
    need_coder()
    codec = CodedPages(layout)
    size = layout.page_stride[bucket]
    coded = bytearray(codec.encode(bucket, page_of(size, 0, 40)))
    at = data.draw(st.integers(0, len(coded) - 1))
    if data.draw(st.booleans()):
        del coded[at:]
        with pytest.raises(KvlatheError, match="cold page"):
            codec.decode(bucket, bytes(coded))
        return
    coded[at] ^= data.draw(st.integers(1, 255))
    try:
        found = codec.decode(bucket, bytes(coded))
    except KvlatheError:
        return
    assert len(found) == size


@pytest.mark.parametrize("kind", ["one", "sealed split", "windowed"])
def test_a_sequence_is_swapped_and_comes_back(kind: str) -> None:
    layout = LAYOUTS[kind]
    buckets = len(layout.page_stride)
    size = 8 * buckets * max(layout.page_stride)
    pages, pool = HostPages(layout, size), PagePool(layout, size)
    need_coder()
    mover = ColdPages(pages, CodedPages(layout))
    table = PageTable(pool.take([2] * buckets), [100] * buckets, [100] * buckets)
    before: list[bytes] = []
    for bucket, ids in enumerate(table.pages):
        for page in ids:
            data = page_of(layout.page_stride[bucket], page, 40)
            pages.write_page(bucket, page, data)
            before.append(data)
    swapped = pool.swap_out(table, mover)
    held = sum(len(data) for bucket in swapped.data for data in bucket)
    assert held < 0.9 * sum(map(len, before))
    pages.memory[:] = 0
    back = pool.swap_in(swapped, mover)
    after: list[bytes] = []
    for bucket, ids in enumerate(back.pages):
        after += [pages.read_page(bucket, page) for page in ids]
    assert after == before and back.lengths == [100] * buckets


@pytest.mark.slow
def test_answers_do_not_depend_on_where_sequences_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts that do not fit beside each other's answers: the youngest waits on the
    host, in fewer bytes."""
    prompts = [list(text(120, start)) for start in range(0, 800, 100)]
    params = SamplingParams(max_new_tokens=70, ignore_eos=True)
    with llm("onnxruntime", "sealed") as roomy:
        expected = [answer.token_ids for answer in roomy.generate(prompts, params)]
    monkeypatch.setattr(Scheduler, "_recomputes", lambda *_: False)
    monkeypatch.setattr(Admission, "fits", lambda *_: True)  # it hopes for the best
    with llm("onnxruntime", "sealed", tokens=300) as tight:
        need_coder()
        tight.code_cold_pages()
        found = [answer.token_ids for answer in tight.generate(prompts, params)]
        assert tight.engine.scheduler.preemptions > 0
    assert found == expected


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "find", lambda: Found(None, "it is not built"))
    with pytest.raises(KvlatheError, match=r"not built.*kvlathe native"):
        CodedPages(LAYOUTS["one"])


def test_an_older_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Native(Path("old.so"), CDLL(None), "portable", False)
    monkeypatch.setattr(coding, "find", lambda: Found(old))
    with pytest.raises(KvlatheError, match=r"old\.so is of an older kvlathe"):
        CodedPages(LAYOUTS["one"])
