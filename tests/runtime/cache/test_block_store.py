"""Laws of evicted prefixes: they come back and change nothing, whatever happens to the
disk; what is lost is computed again."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.block_store import (
    BlockStores,
    HostStore,
    StoreSizes,
    open_stores,
)
from kvlathe.runtime.cache.disk_store import DiskStore
from kvlathe.runtime.cache.parcel import FORM, Origin
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.coded_pages import need_coder
from tests.support.nightly import rest_nightly
from tests.support.prefix_cases import forget, prefixes, sharing
from tests.support.runtime_cases import llm, text

KINDS = ("one", "split", "sealed", "sealed after", "sealed split", "windowed")
KINDS += ("sealed windows", "aged")
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
PROMPT = list(text(1100))
ORIGIN = Origin("0" * 64, "1" * 64, FORM)
BIG = 1 << 30


def storing(kind: str, host: int | None, folder: Path | None = None) -> LLM:
    engine = sharing(kind)
    engine.keep_evicted(StoreSizes(host, folder))
    return engine


def stores(engine: LLM) -> BlockStores:
    found = prefixes(engine).stores
    assert found is not None
    return found


def evicted(engine: LLM, prompt: list[int] = PROMPT) -> None:
    """Compute a prompt, and give its pages up."""
    engine.generate([prompt], PARAMS)
    forget(engine)
    disk = stores(engine).disk
    if disk is not None:
        disk.flush()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for kind in KINDS:
        with llm("torch", kind) as alone:
            found[kind] = alone.generate([PROMPT], PARAMS)[0].token_ids
    return found


PLACES = ("host", "disk", "both")
EVICTED = rest_nightly(
    itertools.product(KINDS, PLACES),
    *((kind, PLACES[i % 3]) for i, kind in enumerate(KINDS)),
)
"""Each kind in one place; in every place, nightly."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), EVICTED)
def test_an_evicted_prefix_comes_back_and_changes_nothing(
    kind: str, place: str, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    host = None if place == "disk" else BIG
    folder = None if place == "host" else tmp_path
    engine = storing(kind, host, folder)
    evicted(engine)
    found = stores(engine)
    blocks = len(PROMPT) // prefixes(engine).block
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == expected[kind]
    hits = found.disk_hits if place == "disk" else found.host_hits
    assert hits == blocks
    assert prefixes(engine).hits == blocks * prefixes(engine).block >= 1024
    forget(engine)


@pytest.mark.parametrize("kind", ["sealed", "windowed"])
def test_another_process_finds_what_was_written(
    kind: str, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """Closing writes what is in the pool and in the host's memory."""
    with storing(kind, BIG, tmp_path) as first:
        evicted(first, PROMPT[:600])
        first.generate([PROMPT], PARAMS)
    with storing(kind, None, tmp_path) as second:
        assert second.generate([PROMPT], PARAMS)[0].token_ids == expected[kind]
        assert stores(second).disk_hits == 2
        forget(second)


def test_a_part_of_an_evicted_prefix_comes_back_with_its_window(tmp_path: Path) -> None:
    """The window of a block in the middle is not brought back with a longer prefix.
    Who ends there still gets it."""
    kind, short = "sealed windows", PROMPT[:600]
    with llm("torch", kind) as alone:
        wanted = alone.generate([short], PARAMS)[0].token_ids
    engine = storing(kind, None, tmp_path)
    evicted(engine)
    engine.generate([PROMPT], PARAMS)
    before = prefixes(engine).hits
    assert engine.generate([short], PARAMS)[0].token_ids == wanted
    assert prefixes(engine).hits - before == 512
    forget(engine)


def test_tenants_do_not_find_each_others_files(tmp_path: Path) -> None:
    engine = storing("one", None, tmp_path)
    evicted(engine)
    table, cached = prefixes(engine).find(PROMPT, b"tenant")
    assert cached == 0 and not any(table.pages)
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o77 == 0


@pytest.mark.slow
@settings(max_examples=6)
@given(data=st.data())
def test_a_damaged_file_costs_its_block_and_nothing_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut short, changed in a place, or gone: the request is answered as ever, and the
    log has one line for each file that was there."""
    engine, folder = storing("sealed", None, tmp_path_factory.mktemp("disk")), None
    evicted(engine)
    disk = stores(engine).disk
    assert disk is not None
    folder = disk.folder
    for path in sorted(folder.iterdir()):
        content = bytearray(path.read_bytes())
        how = data.draw(st.sampled_from(["whole", "cut", "changed", "gone", "other"]))
        at = data.draw(st.integers(0, len(content) - 1))
        if how == "gone":
            path.unlink()
        elif how == "other":
            path.write_bytes(b"another program's")
        elif how == "cut":
            path.write_bytes(content[:at])
        elif how == "changed":
            content[at] ^= data.draw(st.integers(1, 255))
            path.write_bytes(content)
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == WANTED["sealed"]
    assert disk.failures <= 2
    forget(engine)


WANTED: dict[str, list[int]] = {}


@pytest.fixture(scope="module", autouse=True)
def wanted(expected: dict[str, list[int]]) -> None:
    WANTED.update(expected)


def test_a_full_disk_hurts_nobody(
    tmp_path: Path,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = storing("sealed", None, tmp_path)

    def full(*_: Any) -> None:  # noqa: ANN401
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(Path, "replace", full)
        evicted(engine)
        assert engine.generate([PROMPT], PARAMS)[0].token_ids == expected["sealed"]
        forget(engine)
    said = [one.message for one in caplog.records if "No space left" in one.message]
    disk = stores(engine).disk
    assert len(said) == 1 and disk is not None and disk.failures == 1
    assert not list(disk.folder.iterdir())


def test_a_pool_without_room_computes_what_it_cannot_bring_back(tmp_path: Path) -> None:
    engine = storing("sealed", BIG, tmp_path)
    evicted(engine)
    taken: list[list[list[int]]] = []
    with pytest.raises(KvlatheError, match="is full"):
        while True:
            taken.append(engine.pool.take([0, 1]))
    table, cached = prefixes(engine).find(PROMPT)
    assert cached == 0 and not any(table.pages)
    for pages in taken:
        engine.pool.drop(pages)
    table, cached = prefixes(engine).find(PROMPT)
    assert cached == 1024
    engine.pool.release(table)
    forget(engine)


# -- the stores themselves -------------------------------------------------------------
keys = st.integers(0, 9).map(lambda i: bytes([i]) * 32)
blocks = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3)


@settings(max_examples=40)
@given(st.lists(st.tuples(keys, blocks), max_size=20), st.integers(1, 120))
def test_a_host_store_keeps_the_newest_that_fit(
    puts: list[tuple[bytes, list[bytes]]], capacity: int
) -> None:
    """Against a list that is cut from its old end."""
    store, model = HostStore(capacity), list[tuple[bytes, list[bytes]]]()
    for key, pages in puts:
        if key in store:
            continue
        store.put(key, [pages])
        model.append((key, pages))
        while sum(len(b"".join(x)) for _, x in model) > capacity:
            del model[0]
        assert store.bytes == sum(len(b"".join(x)) for _, x in model) <= capacity
    for key, pages in model:
        assert store.get(key) == [pages]
    assert all(key in dict(model) or key not in store for key, _ in puts)


def test_a_disk_store_keeps_within_its_bytes_over_restarts(tmp_path: Path) -> None:
    page = [[os.urandom(1000)]]
    store = DiskStore(tmp_path, 7000, ORIGIN)
    for i in range(12):
        store.put(bytes([i]) * 32, page)
        store.flush()
    files = list(store.folder.iterdir())
    assert sum(path.stat().st_size for path in files) == store.bytes <= 7000
    for age, path in enumerate(sorted(files, reverse=True)):
        os.utime(path, (1e9 - age, 1e9 - age))
    again = DiskStore(tmp_path, 7000, ORIGIN)
    assert again.bytes == store.bytes
    assert again.get(bytes([11]) * 32) == page
    again.put(bytes([50]) * 32, page)
    again.flush()
    assert bytes([11]) * 32 in again and bytes([50]) * 32 in again


def test_a_smaller_disk_store_begins_within_its_bytes(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BIG, ORIGIN)
    for i in range(4):
        store.put(bytes([i]) * 32, [[os.urandom(1000)]])
    store.flush()
    smaller = DiskStore(tmp_path, store.bytes // 2, ORIGIN)
    files = list(store.folder.iterdir())
    assert 0 < sum(path.stat().st_size for path in files) == smaller.bytes
    assert smaller.bytes <= smaller.capacity


def test_a_folder_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    """Files would be written, and removed, wherever they like."""
    top, private = tmp_path / "top", tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "old.new").touch()
    os.utime(private / "old.new", (0, 0))
    leaf = DiskStore(top, BIG, ORIGIN).folder
    leaf.rmdir()
    leaf.symlink_to(private)
    with pytest.raises(KvlatheError, match="it is a link"):
        DiskStore(top, BIG, ORIGIN)
    leaf.unlink()
    for loose in (top, tmp_path):
        kept = loose.stat().st_mode
        loose.chmod(0o777)
        with pytest.raises(KvlatheError, match=r"others may write .*mode 777"):
            DiskStore(top, BIG, ORIGIN)
        loose.chmod(0o1777)  # as /tmp
        DiskStore(top, BIG, ORIGIN)
        loose.chmod(kept)
    assert list(private.iterdir()) == [private / "old.new"]


def test_a_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BIG, ORIGIN)
    aim = tmp_path / "aim"
    aim.write_text("kept")
    store._path(b"k" * 32).with_suffix(f".{os.getpid()}.new").symlink_to(aim)
    store.put(b"k" * 32, [[b"page"]])
    store.flush()
    assert aim.read_text() == "kept"
    [path] = store.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and not path.is_symlink()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 1, ORIGIN)
    foreign = store.folder / "notes.txt"
    foreign.write_text("mine")
    stale = store.folder / f"{'0' * 64}.1.new"
    stale.write_bytes(b"")
    os.utime(stale, (0, 0))
    again = DiskStore(tmp_path, 1, ORIGIN)
    again.put(b"k" * 32, [[b"page"]])
    again.flush()
    assert sorted(store.folder.iterdir()) == [foreign] and again.bytes == 0


def test_blocks_of_another_origin_are_not_found(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, BIG, ORIGIN)
    store.put(b"k" * 32, [[b"page"]])
    store.flush()
    other = DiskStore(tmp_path, BIG, Origin("0" * 64, "2" * 64, FORM))
    assert b"k" * 32 not in other
    # Nor if somebody moves the file there.
    [path] = store.folder.iterdir()
    path.rename(other.folder / path.name)
    moved = DiskStore(tmp_path, BIG, other.origin)
    assert b"k" * 32 in moved and moved.get(b"k" * 32) is None
    assert moved.failures == 1


def test_wrong_stores_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with llm("torch", "one") as engine:
        with pytest.raises(KvlatheError, match="without sharing"):
            engine.keep_evicted(StoreSizes(BIG))
        with pytest.raises(KvlatheError, match="no place"):
            open_stores(engine.session, [1], ORIGIN, StoreSizes())
        with pytest.raises(KvlatheError, match="--disk-cache"):
            open_stores(engine.session, [1], ORIGIN, StoreSizes(folder=file))


def test_coded_pages_are_stored_coded(
    tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    need_coder()
    plain = storing("one", None, tmp_path)
    evicted(plain)
    coded = storing("one", None, tmp_path)
    coded.code_cold_pages()
    assert coded.generate([PROMPT], PARAMS)[0].token_ids == expected["one"]
    assert stores(coded).disk_hits == 0
    forget(coded)
    disk, other = stores(coded).disk, stores(plain).disk
    assert disk is not None and other is not None
    disk.flush()
    assert 0 < disk.bytes < other.bytes
    assert coded.generate([PROMPT], PARAMS)[0].token_ids == expected["one"]
    assert stores(coded).disk_hits == 17
    forget(coded)
