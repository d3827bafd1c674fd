"""Finished builds, kept by digest: the same request again is a matter of links.

    $KVLATHE_CACHE (or $XDG_CACHE_HOME/kvlathe, or ~/.cache/kvlathe)
      engines/<key>/   an engine folder; its files are hard links of those given out, where the file system allows
      stats/<key>.npz  calibration results        curves/  scores by ratio, by model and task

A key is the SHA-256 of everything that decides the result (plan inputs, weights, options, backend, library versions,
architectures, this package's own source). Entries are used in place, so pruning needs no index.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvlathe.console import log
from kvlathe.engines import manifest as manifests
from kvlathe.engines.folder import appearing, whole_file
from kvlathe.engines.manifest import MANIFEST_FILE, Manifest
from kvlathe.errors import KvlatheError

LIMIT_BYTES = 32 << 30
"""The cache keeps no more than this: the least recently used engines leave when a new one arrives."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One cached engine. ``size`` in bytes, ``last_used`` in seconds since the epoch."""

    key: str
    folder: Path
    manifest: Manifest
    size: int
    last_used: float


def root() -> Path:
    if chosen := os.environ.get("KVLATHE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlathe"


def stats_path(key: str) -> Path:
    return root() / "stats" / f"{key}.npz"


def curves_folder() -> Path:
    return root() / "curves" / source_digest()[:16]


def key_of(facts: Mapping[str, object]) -> str:
    """SHA-256 of ``facts`` (anything JSON can hold) and of this package's source."""
    return hashlib.sha256(json.dumps([facts, source_digest()], sort_keys=True, default=str).encode()).hexdigest()


@lru_cache
def source_digest() -> str:
    """SHA-256 over the package's Python files: a changed kvlathe must not answer with an older one's engines."""
    package = Path(manifests.__file__).parent.parent
    digest = hashlib.sha256()
    for pattern in ("*.py", "export/**/*.py", "engines/**/*.py"):
        for path in sorted(package.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def find(key: str) -> Manifest | None:
    """The manifest of engine ``key``, its files verified. None if there is none; a damaged one is dropped."""
    folder = root() / "engines" / key
    if not folder.is_dir():
        return None
    try:
        found = manifests.verify(folder)
    except KvlatheError as error:
        log.warning("a cached engine is dropped: %s", error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    os.utime(folder)
    return found


def give(key: str, manifest: Manifest, into: Path) -> None:
    """Fill folder ``into`` with the files of engine ``key``, manifest aside."""
    for name in manifest.files:
        _link(root() / "engines" / key / name, into / name)


def keep(key: str, folder: Path) -> None:
    """Add finished engine ``folder`` under ``key``, unless it is too big. A cache that cannot be written only warns."""
    kept = root() / "engines" / key
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if kept.exists() or size > LIMIT_BYTES:
        return
    try:
        with appearing(kept) as work:
            for path in folder.rglob("*"):
                if path.is_file():
                    _link(path, work / path.relative_to(folder))
        prune(max_bytes=LIMIT_BYTES)
    except (OSError, KvlatheError) as error:
        log.warning("this build is not cached: %s", error)


def keep_file(kept: Path, save: Callable[[Path], None]) -> None:
    """Write a calibration or a curve into the cache through ``save``. A cache that cannot be written only warns."""
    try:
        with whole_file(kept) as part:
            save(part)
    except (OSError, KvlatheError) as error:
        log.warning("%s is not cached: %s", kept.name, error)


def _link(source: Path, target: Path) -> None:
    """A hard link where both lie on one file system (no bytes move), a copy elsewhere and for the manifest."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.name != MANIFEST_FILE:
        try:
            os.link(source, target)
            return
        except OSError:
            pass
    shutil.copyfile(source, target)


def entries() -> list[Entry]:
    """All cached engines, the most recently used first. Unreadable ones are left out (prune removes them)."""
    found = []
    for folder in (root() / "engines").glob("[!.]*"):
        try:
            manifest = manifests.read(folder)
        except KvlatheError:
            continue
        found.append(Entry(folder.name, folder, manifest, manifest.size, folder.stat().st_mtime))
    return sorted(found, key=lambda entry: -entry.last_used)


def prune(older_than_days: float | None = None, max_bytes: int | None = None, everything: bool = False) -> list[Entry]:
    """Remove the cached engines not used for ``older_than_days``, then the least recently used beyond ``max_bytes``.

    ``everything`` also empties calibration results and curves. Returns what was removed. Engine folders that were built
    are not touched: their files stay until their own last link goes.
    """
    removed, held = [], 0
    for entry in entries():
        old = older_than_days is not None and time.time() - entry.last_used > older_than_days * 86400
        big = max_bytes is not None and held + entry.size > max_bytes
        if everything or old or big:
            shutil.rmtree(entry.folder, ignore_errors=True)
            removed.append(entry)
        else:
            held += entry.size
    if everything:
        for name in ("engines", "stats", "curves"):
            shutil.rmtree(root() / name, ignore_errors=True)
    return removed
