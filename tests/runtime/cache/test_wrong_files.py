"""Laws of a disk store whose files, folder or disk are not as they should be: no
request fails, nothing wrong is adopted, and closing comes to its end."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache import disk_store, parcel
from kvlathe.runtime.cache.block_store import StoreSizes
from kvlathe.runtime.cache.cold import CODING
from kvlathe.runtime.cache.disk_store import DiskStore, StoredBlock
from kvlathe.runtime.cache.parcel import PageList, pack, said
from kvlathe.runtime.llm import LLM
from tests.runtime.cache.test_block_store import (
    BIG,
    ORIGIN,
    PARAMS,
    PROMPT,
    evicted,
    stores,
    storing,
)
from tests.support.coded_pages import need_coder
from tests.support.nightly import rest_nightly
from tests.support.prefix_cases import forget, prefixes, sharing
from tests.support.runtime_cases import llm

SHORT = PROMPT[:600]
KEY = b"k" * 32
PAGE = [[b"page" * 250]]


def disk_of(engine: LLM) -> DiskStore:
    disk = stores(engine).disk
    assert disk is not None
    return disk


def rewrite(path: Path, disk: DiskStore, pages: list[list[bytes]]) -> None:
    """A file whose digests are right, with other pages."""
    listed = PageList.of(disk.origin, pages, disk.coding)
    text = said(StoredBlock(path.stem, listed))
    path.write_bytes(b"".join(pack(text, pages)))


WRONG = {
    "no pages": lambda _: [[]] * 2,
    "small pages": lambda pages: [[b"abc"] * len(own) for own in pages],
    "pages of one byte": lambda pages: [[b"a"] * len(own) for own in pages],
    "a bucket too many": lambda pages: [*pages, []],
    "a bucket too few": lambda pages: pages[:1],
    "a page too few": lambda pages: [own[:-1] for own in pages],
    "a page too many": lambda pages: [[*own, *own[:1]] for own in pages],
}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for kind in ("sealed", "windowed"):
        with llm("torch", kind) as alone:
            found[kind] = alone.generate([SHORT], PARAMS)[0].token_ids
    return found


@pytest.mark.parametrize(
    ("kind", "coded"),
    rest_nightly(
        itertools.product(["sealed", "windowed"], [False, True]),
        ("sealed", True),
        ("windowed", False),
    ),
)
def test_pages_of_no_block_are_computed_again_and_removed(
    kind: str, coded: bool, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    engine = storing(kind, None, tmp_path)
    if coded:
        need_coder()
        engine.code_cold_pages()
    disk = disk_of(engine)
    for failures, (name, change) in enumerate(WRONG.items(), 1):
        evicted(engine, SHORT)
        for path in disk.folder.iterdir():
            stored = disk.get(bytes.fromhex(path.stem))
            assert stored is not None
            pages = [[bytes(page) for page in own] for own in stored]
            rewrite(path, disk, change(pages))
        assert engine.generate([SHORT], PARAMS)[0].token_ids == expected[kind], name
        assert disk.failures == failures, name
        assert not list(disk.folder.iterdir()), name
    assert engine.pool.bytes_in_use
    forget(engine)


def test_a_description_that_is_no_text_is_damaged(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BIG, ORIGIN)
    store.put(KEY, PAGE)
    store.flush()
    body = b"\xff\xfe"
    digest = parcel.hashlib.sha256(body).digest()
    head = parcel.HEAD.pack(parcel.MARK, len(body), digest)
    with pytest.raises(KvlatheError, match="is no text"):
        parcel.unpack(head + body)
    [path] = store.folder.iterdir()
    path.write_bytes(head + body)
    assert store.get(KEY) is None and KEY not in store
    assert store.failures == 1 and not path.exists()


def test_a_block_that_waits_is_not_queued_again(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BIG, ORIGIN)
    ready = threading.Event()
    store._writer.submit(ready.wait)
    for _ in range(3):
        store.put(KEY, PAGE)
    assert KEY in store and store.get(KEY) == PAGE
    ready.set()
    store.flush()
    [path] = store.folder.iterdir()
    assert store.bytes == path.stat().st_size
    assert store.get(KEY) == PAGE


def test_a_block_that_is_written_again_counts_once(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BIG, ORIGIN)
    for _ in range(2):
        store._write(KEY, PAGE, 0)
    [path] = store.folder.iterdir()
    assert store.bytes == path.stat().st_size


@pytest.mark.parametrize("first", ["stores", "codes"])
def test_the_coding_is_the_movers_whichever_was_asked_first(
    first: str, tmp_path: Path
) -> None:
    need_coder()
    engine = sharing("one")
    if first == "codes":
        engine.code_cold_pages()
    engine.keep_evicted(StoreSizes(None, tmp_path))
    if first == "stores":
        engine.code_cold_pages()
    evicted(engine, SHORT)
    disk = disk_of(engine)
    assert disk.coding == CODING and disk.folder.name.endswith(f"-{CODING}")
    with storing("one", None, tmp_path) as plain:
        expected = plain.generate([SHORT], PARAMS)[0].token_ids
        assert not stores(plain).disk_hits and not disk_of(plain).failures
    assert engine.generate([SHORT], PARAMS)[0].token_ids == expected
    assert stores(engine).disk_hits == 9
    forget(engine)


def test_a_file_that_vanishes_while_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes room just then."""
    store = DiskStore(tmp_path, BIG, ORIGIN)
    for key in (KEY, b"l" * 32):
        store.put(key, PAGE)
    store.flush()
    stale = store.folder / f"{'0' * 64}.1.new"
    stale.write_bytes(b"")
    os.utime(stale, (0, 0))
    listed = list(os.scandir(store.folder))
    for path in (store._path(KEY), stale):
        path.unlink()
    monkeypatch.setattr(disk_store.os, "scandir", lambda _: listed)
    again = DiskStore(tmp_path, BIG, ORIGIN)
    assert KEY not in again and b"l" * 32 in again


def test_closing_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlathe.runtime.llm.SAVE_SECONDS", 0.2)
    engine, ready = storing("one", BIG, tmp_path), threading.Event()
    evicted(engine, SHORT)
    engine.generate([PROMPT], PARAMS)
    disk = disk_of(engine)
    disk._writer.submit(ready.wait)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    assert not engine.thread.alive
    ready.set()
    assert disk.flush(10)
    assert not list(disk.folder.iterdir())  # what waited was dropped


def test_closing_ends_the_thread_whatever_the_stores_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = storing("one", None, tmp_path)
    engine.generate([SHORT], PARAMS)

    def refused(*_: Any) -> None:  # noqa: ANN401
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(prefixes(engine), "save", refused)
    with pytest.raises(RuntimeError):
        engine.close()
    assert not engine.thread.alive


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o702])
def test_a_folder_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    folder = DiskStore(tmp_path, BIG, ORIGIN).folder
    folder.chmod(mode)
    with pytest.raises(KvlatheError, match=f"mode {mode:o}"):
        DiskStore(tmp_path, BIG, ORIGIN)


def test_a_block_that_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would block the engine for ever; a link leads elsewhere."""
    store = DiskStore(tmp_path, BIG, ORIGIN)
    store.put(KEY, PAGE)
    store.flush()
    other = tmp_path / "elsewhere"
    store._path(KEY).rename(other)
    store._path(KEY).symlink_to(other)
    assert KEY not in DiskStore(tmp_path, BIG, ORIGIN)
    assert store.get(KEY) is None and other.exists()
    os.mkfifo(store._path(KEY))
    assert KEY not in DiskStore(tmp_path, BIG, ORIGIN)
    assert store.get(KEY) is None


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "MOST_WAITING", 10_000)
    monkeypatch.setattr(disk_store, "MOST_SAID", 0)
    store = DiskStore(tmp_path, BIG, ORIGIN)
    store.put(KEY, PAGE)
    store.flush()
    with store._path(KEY).open("r+b") as file:
        file.truncate(1 << 40)
    assert store.get(KEY) is None and not store._path(KEY).exists()


def test_a_prefix_that_came_back_from_disk_is_on_the_host(tmp_path: Path) -> None:
    with storing("sealed", None, tmp_path) as first:
        evicted(first, SHORT)
    engine = storing("sealed", BIG, tmp_path)
    for _ in range(2):
        engine.generate([SHORT], PARAMS)
        forget(engine)
    assert (stores(engine).disk_hits, stores(engine).host_hits) == (1, 1)
