"""The build cache: what comes out is what went in, damage is noticed, the least
recently used leaves first, and nothing leaves that is not its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines import cache
from kvlathe.plan import manifest as manifests
from kvlathe.plan.manifest import KvBytes, Limits, Manifest
from tests.test_architecture import MAY_SEE

DAY = 86400
KEYS = dict(zip("abck", ("a" * 64, "b" * 64, "c" * 64, "e" * 64), strict=True))
K = KEYS["k"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))


def engine(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "weights").write_bytes(weights)
    (folder / "plan.json").write_text("{}")
    facts = Manifest(
        model="tiny",
        compression="none",
        backend="onnxruntime",
        versions={},
        architectures=("cpu",),
        compute_dtype="float32",
        weights="float32",
        limits=Limits(1, 16, 16, 16),
        page_tokens=16,
        prefill_chunk=16,
        kv_bytes=KvBytes(1.0, 1.0, 1.0),
        plan_digest="",
        model_digest="",
        command="",
        created="",
    )
    manifests.write(folder, facts)
    return folder


def test_an_engine_comes_back_as_it_went_in_and_shares_no_file(
    tmp_path: Path,
) -> None:
    built = engine(tmp_path / "built", b"abc")
    cache.keep(K, built)
    (tmp_path / "again").mkdir()
    kept = cache.find(K)
    assert kept is not None and kept == manifests.read(built)
    cache.give(K, kept, tmp_path / "again")
    (built / "weights").write_bytes(b"xyz")  # somebody edits an engine in place
    (tmp_path / "again" / "weights").write_bytes(b"uvw")
    assert cache.find(K) == kept
    assert not (tmp_path / "again" / "manifest.json").exists()
    assert cache.find("f" * 64) is None


@pytest.mark.parametrize("shares", [True, False])
def test_a_large_engine_is_kept_only_where_that_takes_no_room(
    shares: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def share(source: Path, target: Path) -> bool:
        if shares:
            target.write_bytes(source.read_bytes())
        return shares

    monkeypatch.setattr(cache, "_shares_blocks", share)
    monkeypatch.setattr(cache, "COPY_BYTES", 10)
    cache.keep(K, engine(tmp_path / "built", b"eleven bytes"))
    assert (cache.find(K) is not None) == shares
    assert ("as much again" in caplog.text) != shares
    folder = tmp_path / "cache" / "engines"
    assert len([path for path in folder.iterdir() if path.is_dir()]) == shares


def test_a_cached_engine_outlives_the_folder_it_came_from(tmp_path: Path) -> None:
    built = engine(tmp_path / "built", b"abc")
    cache.keep(K, built)
    (built / "weights").unlink()
    (tmp_path / "again").mkdir()
    kept = cache.find(K)
    assert kept is not None
    cache.give(K, kept, tmp_path / "again")
    assert (tmp_path / "again" / "weights").read_bytes() == b"abc"


def test_a_damaged_entry_is_dropped_not_given_out(tmp_path: Path) -> None:
    cache.keep(K, engine(tmp_path / "built", b"abc"))
    (cache.root() / "engines" / K / "weights").write_bytes(b"abd")
    assert cache.find(K) is None
    assert cache.entries() == []


def test_a_cache_that_is_only_read_gives_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.keep(K, engine(tmp_path / "built", b"abc"))

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    assert cache.find(K) == manifests.read(tmp_path / "built")


def test_a_user_without_a_home_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HOME", "KVLATHE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(KvlatheError, match=r"has no home.*Set KVLATHE_CACHE"):
        cache.root()


def test_a_key_changes_with_every_part_that_decides_an_engine() -> None:
    """The parts are those that engines/ imports, directly or not."""
    seen, left = set[str](), ["engines"]
    while left:
        seen.add(room := left.pop())
        left += MAY_SEE[room] - seen
    patterns = (f"{room}/**/*.py" for room in seen)
    assert sorted(cache.SOURCES) == sorted(patterns)


def test_pruning_by_age_by_size_and_whole(tmp_path: Path) -> None:
    keys = [letter * 64 for letter in "abcd"]
    for days, key in enumerate(keys):
        cache.keep(key, engine(tmp_path / key[0], bytes(100)))
        used = tmp_path.stat().st_mtime - days * DAY - 60
        os.utime(cache.root() / "engines" / key, times=(0, used))
    assert [entry.key for entry in cache.entries()] == keys
    assert removed(older_than_days=2.5) == keys[3:]
    assert removed(max_bytes=250) == keys[2:3]
    cache.keep_file(cache.stats_path("0" * 64), lambda path: path.touch())
    curves = cache.curves_folder()
    assert curves is not None
    (curves / "scores.json").write_text("{}")
    assert removed(everything=True) == keys[:2]
    assert list(cache.root().iterdir()) == []
    assert (tmp_path / "a" / "weights").exists()  # engines that were given out stay


def removed(**options: Any) -> list[str]:  # noqa: ANN401
    return [entry.key for entry in cache.prune(**options).removed]


@pytest.mark.parametrize("step", [-1, 1])
def test_engines_of_an_older_version_go_and_those_of_a_newer_one_stay(
    step: int, tmp_path: Path
) -> None:
    cache.keep(K, engine(tmp_path / "built", b"abc"))
    folder = cache.root() / "engines" / K
    path = folder / manifests.MANIFEST_FILE
    written = json.loads(path.read_text())
    other = {"schema_version": manifests.SCHEMA_VERSION + step}
    path.write_text(json.dumps(written | other))
    assert cache.entries() == [] and folder.is_dir()
    pruned = cache.prune(max_bytes=1 << 40)
    gone = [folder] if step < 0 else []
    assert pruned.outdated == gone and pruned.removed == []
    assert folder.is_dir() == (step > 0) and (tmp_path / "built").is_dir()


@pytest.mark.parametrize("text", ["{", "[2]", "{}", '{"schema_version": "2"}'])
def test_an_engine_whose_manifest_is_unreadable_stays(
    text: str, tmp_path: Path
) -> None:
    cache.keep(K, engine(tmp_path / "built", b"abc"))
    folder = cache.root() / "engines" / K
    (folder / manifests.MANIFEST_FILE).write_text(text)
    pruned = cache.prune(max_bytes=1 << 40)
    assert pruned.outdated == [] and folder.is_dir()


def test_an_engine_that_cannot_be_read_just_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.keep(K, engine(tmp_path / "built", b"abc"))

    def fails(*_arguments: object, **_options: object) -> str:
        raise OSError("stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fails)
        assert cache.prune(max_bytes=1 << 40).outdated == []
    assert cache.find(K) is not None


def test_pruning_leaves_and_names_all_that_the_cache_did_not_make(
    tmp_path: Path,
) -> None:
    """Somebody keeps engines and statistics where the cache was told to be."""
    theirs = cache.root() / "engines"
    theirs.mkdir(parents=True)
    mine = engine(theirs / "mine", b"abc")
    hashed = engine(theirs / ("0" * 64), b"abc")  # named as an entry, not marked
    (cache.root() / "stats").mkdir()
    notes = cache.root() / "stats" / f"{'1' * 64}.npz"
    notes.write_text("not ours")
    (cache.root() / "photos").mkdir()
    linked = theirs / ("2" * 64)
    linked.symlink_to(mine)
    cache.keep(K, engine(tmp_path / "built", b"abc"))
    pruned = cache.prune(everything=True)
    assert [entry.key for entry in pruned.removed] == [K]
    assert pruned.left == sorted([mine, hashed, linked, notes])
    assert (mine / "weights").read_bytes() == b"abc" and notes.exists()
    assert (cache.root() / "photos").is_dir() and not (theirs / K).exists()


def test_a_foreign_file_inside_an_entry_stays(tmp_path: Path) -> None:
    cache.keep(K, engine(tmp_path / "built", b"abc"))
    note = cache.root() / "engines" / K / "note.txt"
    note.write_text("mine")
    pruned = cache.prune(everything=True)
    assert pruned.left == [note.parent]
    assert list(note.parent.iterdir()) == [note]


def test_the_limit_holds_and_what_is_beyond_it_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LIMIT_BYTES", 15_000)
    cache.keep(KEYS["a"], engine(tmp_path / "a", bytes(10_000)))
    os.utime(cache.root() / "engines" / KEYS["a"], times=(0, 0))
    cache.keep(KEYS["b"], engine(tmp_path / "b", bytes(10_000)))
    cache.keep(KEYS["c"], engine(tmp_path / "c", bytes(20_000)))
    assert [entry.key for entry in cache.entries()] == [KEYS["b"]]


def test_kept_engines_take_half_of_what_a_disk_has_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimpleNamespace(free=70_000)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: disk)
    for age, name in enumerate("abc"):
        cache.keep(KEYS[name], engine(tmp_path / name, bytes(10_000)))
        os.utime(cache.root() / "engines" / KEYS[name], times=(age, age))
        disk.free -= 10_000
    assert len(cache.entries()) == 3
    disk.free = 0
    cache.keep(K, engine(tmp_path / "d", bytes(10_000)))
    assert [entry.key for entry in cache.entries()] == [K]
    cache.keep(KEYS["a"], engine(tmp_path / "large", bytes(20_000)))
    assert [entry.key for entry in cache.entries()] == [K]
    assert "not cached" in caplog.text and "half of what the disk" in caplog.text


def test_an_engine_that_is_not_kept_takes_no_others_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LIMIT_BYTES", 15_000)
    cache.keep(K, engine(tmp_path / "first", bytes(10_000)))
    monkeypatch.setattr(cache, "COPY_BYTES", 10_000)
    monkeypatch.setattr(cache, "_shares_blocks", lambda *_: False)
    cache.keep(KEYS["a"], engine(tmp_path / "second", bytes(10_000)))
    assert [entry.key for entry in cache.entries()] == [K]


@pytest.mark.parametrize("number", manifests.REFUSED)
def test_a_kept_engine_that_cannot_be_read_just_now_is_not_dropped(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.keep(K, engine(tmp_path / "built", b"abc"))

    def refused(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(manifests, "pieces_digest", refused)
        assert cache.find(K) is None
    assert cache.find(K) is not None


def test_a_cache_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "file"))
    cache.keep(K, engine(tmp_path / "built", b"abc"))
    assert cache.curves_folder() is None


def test_keys_depend_on_every_fact_and_on_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = cache.key_of({"a": 1, "b": "x"})
    assert key == cache.key_of({"b": "x", "a": 1})
    assert len({key, cache.key_of({"a": 2, "b": "x"}), cache.key_of({"a": 1})}) == 3
    monkeypatch.setattr(cache, "source_digest", lambda: "another version")
    assert key != cache.key_of({"a": 1, "b": "x"})
