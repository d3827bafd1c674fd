"""The build cache: what comes out is what went in, damage is noticed, the least recently used leaves first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvlathe.engines import cache
from kvlathe.engines import manifest as manifests
from kvlathe.engines.manifest import KvBytes, Limits, Manifest

DAY = 86400


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))


def engine(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "weights").write_bytes(weights)
    facts = Manifest(
        model="tiny",
        compression="none",
        backend="onnxruntime",
        versions={},
        architectures=("cpu",),
        compute_dtype="float32",
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


def test_an_engine_comes_back_as_it_went_in_without_moving_bytes(tmp_path: Path) -> None:
    built = engine(tmp_path / "built", b"abc")
    cache.keep("k", built)
    (tmp_path / "again").mkdir()
    found = cache.find("k")
    assert found == manifests.read(built)
    cache.give("k", found, tmp_path / "again")
    assert (tmp_path / "again" / "weights").samefile(built / "weights")
    assert not (tmp_path / "again" / "manifest.json").exists()
    assert cache.find("other") is None


def test_a_cached_engine_outlives_the_folder_it_came_from(tmp_path: Path) -> None:
    built = engine(tmp_path / "built", b"abc")
    cache.keep("k", built)
    (built / "weights").unlink()
    (tmp_path / "again").mkdir()
    found = cache.find("k")
    assert found is not None
    cache.give("k", found, tmp_path / "again")
    assert (tmp_path / "again" / "weights").read_bytes() == b"abc"


def test_a_damaged_entry_is_dropped_not_given_out(tmp_path: Path) -> None:
    built = engine(tmp_path / "built", b"abc")
    cache.keep("k", built)
    (built / "weights").write_bytes(b"abd")  # the same inode: somebody edited an engine in place
    assert cache.find("k") is None
    assert cache.entries() == []


def test_pruning_by_age_by_size_and_whole(tmp_path: Path) -> None:
    for days, key in enumerate("abcd"):
        cache.keep(key, engine(tmp_path / key, bytes(100)))
        os.utime(cache.root() / "engines" / key, times=(0, tmp_path.stat().st_mtime - days * DAY - 60))
    assert [entry.key for entry in cache.entries()] == list("abcd")
    assert [entry.key for entry in cache.prune(older_than_days=2.5)] == ["d"]
    assert [entry.key for entry in cache.prune(max_bytes=250)] == ["c"]
    cache.stats_path("s").parent.mkdir()
    cache.stats_path("s").write_bytes(b"")
    assert [entry.key for entry in cache.prune(everything=True)] == ["a", "b"]
    assert cache.entries() == [] and not cache.stats_path("s").exists()
    assert (tmp_path / "a" / "weights").exists()  # engines that were given out stay


def test_the_limit_holds_and_what_is_beyond_it_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LIMIT_BYTES", 15_000)
    cache.keep("a", engine(tmp_path / "a", bytes(10_000)))
    os.utime(cache.root() / "engines" / "a", times=(0, 0))
    cache.keep("b", engine(tmp_path / "b", bytes(10_000)))
    cache.keep("c", engine(tmp_path / "c", bytes(20_000)))
    assert [entry.key for entry in cache.entries()] == ["b"]


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "file"))
    cache.keep("k", engine(tmp_path / "built", b"abc"))


def test_keys_depend_on_every_fact_and_on_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache.key_of({"a": 1, "b": "x"})
    assert key == cache.key_of({"b": "x", "a": 1})
    assert len({key, cache.key_of({"a": 2, "b": "x"}), cache.key_of({"a": 1})}) == 3
    monkeypatch.setattr(cache, "source_digest", lambda: "another version")
    assert key != cache.key_of({"a": 1, "b": "x"})
