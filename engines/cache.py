"""Finished builds, kept by digest: the same build again is a matter of copies.

    $KVLATHE_CACHE (or $XDG_CACHE_HOME/kvlathe, or ~/.cache/kvlathe)
      engines/<key>/   an engine folder       stats/<key>.npz  calibration results
      curves/<key>/    scores by ratio, by model and task
      checkpoints/<key>/   config and tokenizer of a GGUF file, and a link to it

A key is the SHA-256 of everything that decides the result (plan inputs, weights,
options, backend, library versions, architectures, this package's own source).

A cached engine and one that was given out share no file: editing one leaves the other
as it is. Where the file system can (Btrfs, XFS), they share blocks until one changes.
Where it cannot, engines beyond COPY_BYTES are not kept: a second one on the disk would
cost more than building it again.

The cache may be put anywhere, even where other files are. So every folder that it makes
holds a marker, and pruning removes nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvlathe.base.console import human_bytes, log
from kvlathe.base.errors import KvlatheError
from kvlathe.engines.folder import appearing, foreign, whole_file
from kvlathe.plan import manifest as manifests
from kvlathe.plan.manifest import Manifest, Unreadable

LIMIT_BYTES = 32 << 30
"""The cache keeps no more engines than this, and no more than half of what the disk has
for them (``room``): the least recently used leave when a new one arrives."""

COPY_BYTES = 4 << 30
"""The largest engine that is copied byte by byte."""

MARKER = ".kvlathe-cache"
"""In every folder that this cache has made."""
STORES = {
    "engines": r"[0-9a-f]{64}",
    "stats": r"[0-9a-f]{64}\.npz",
    "curves": r"[0-9a-f]{16}",
    "checkpoints": r"[0-9a-f]{64}",
}
"""Folders of the cache, and what is called as our entries in them are."""
SOURCES = (
    "base/**/*.py",
    "plan/**/*.py",
    "tasks/**/*.py",
    "layers/**/*.py",
    "export/**/*.py",
    "measuring/**/*.py",
    "runtime/**/*.py",
    "engines/**/*.py",
)
"""Files of this package that decide what a build makes, and what it says of it: engines
that rank tokens are measured as they run."""
FICLONE = 0x40049409
"""Linux ioctl_ficlone(2): a copy that shares its blocks with the original."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One cached engine. ``size`` in bytes, ``last_used`` in seconds since the
    epoch."""

    key: str
    folder: Path
    manifest: Manifest
    size: int
    last_used: float


def root() -> Path:
    """The cache's folder. Raises KvlatheError for a user that has no home."""
    if chosen := os.environ.get("KVLATHE_CACHE"):
        return Path(chosen)
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a container's user of any number
        raise KvlatheError(
            "the cache of builds has no folder",
            "this user has no home, and HOME is not set",
            "set KVLATHE_CACHE to a folder that can be written",
        ) from error
    return Path(home) / "kvlathe"


def stats_path(key: str) -> Path:
    return root() / "stats" / f"{key}.npz"


def curves_folder() -> Path | None:
    """The folder of kept scores; None where the cache cannot be written."""
    folder = root() / "curves" / source_digest()[:16]
    try:
        _make_marked(folder)
    except OSError as error:
        log.warning("scores are not cached: %s", error)
        return None
    return folder


def _make_marked(folder: Path) -> None:
    """Make a folder of the cache and those above it; mark the ones below ``root()``."""
    if folder == root():
        folder.mkdir(parents=True, exist_ok=True)
        return
    _make_marked(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    (folder / MARKER).touch()


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / MARKER).is_file()


def key_of(facts: Mapping[str, object]) -> str:
    """SHA-256 of ``facts`` (anything JSON can hold) and of this package's source."""
    return hashlib.sha256(
        json.dumps([facts, source_digest()], sort_keys=True, default=str).encode()
    ).hexdigest()


@lru_cache
def source_digest() -> str:
    """SHA-256 over the package's Python files: a changed kvlathe must not answer with
    an older one's engines."""
    package = Path(manifests.__file__).parent.parent
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(package.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def engine_path(key: str) -> Path:
    """The folder where engine ``key`` is kept, whether it is there or not."""
    return root() / "engines" / key


def adopt(key: str) -> Manifest | None:
    """Keep the engine that a build has put at ``engine_path(key)``; None where there is
    none. Others make room for it."""
    kept = engine_path(key)
    if not kept.is_dir():
        return None
    _make_marked(kept.parent)
    (kept / MARKER).touch()
    manifest = find(key)
    if manifest is not None:
        prune(max_bytes=max(room(), manifest.size))
    return manifest


def find(key: str) -> Manifest | None:
    """The manifest of engine ``key``, its files verified. None if there is none, or if
    it cannot be read just now; a damaged one is dropped."""
    folder = engine_path(key)
    if not _is_ours(folder):
        return None
    try:
        manifest = manifests.verify(folder)
    except Unreadable as error:
        log.warning("a cached engine is not used: %s", error)
        return None
    except KvlatheError as error:
        log.warning("a cached engine is dropped: %s", error)
        _remove(folder)
        return None
    with contextlib.suppress(OSError):  # of a cache that is only read
        os.utime(folder)
    return manifest


def give(key: str, manifest: Manifest, into: Path) -> None:
    """Fill folder ``into`` with the files of engine ``key``, manifest aside."""
    for name in manifest.files:
        _copy(engine_path(key) / name, into / name)


def drop(key: str) -> None:
    """Forget engine ``key``, if it is kept."""
    folder = engine_path(key)
    if _is_ours(folder):
        _remove(folder)


def keep(key: str, folder: Path) -> None:
    """Add finished engine ``folder`` under ``key``, unless it is too big. A cache that
    cannot be written only warns."""
    kept = engine_path(key)
    manifest = manifests.read(folder)
    if kept.exists():
        return
    try:
        _make_marked(kept.parent)
        most = room()
        if manifest.size > most:
            raise KvlatheError(
                f"the engine has {human_bytes(manifest.size)}",
                f"the cache keeps at most {human_bytes(most)} here: "
                f"{human_bytes(LIMIT_BYTES)}, or half of what the disk has for it",
                "put KVLATHE_CACHE on a larger disk",
            )
        with appearing(kept) as work:
            (work / MARKER).touch()
            probe = manifests.MANIFEST_FILE
            shared = _shares_blocks(folder / probe, work / probe)
            if not shared and manifest.size > COPY_BYTES:
                raise KvlatheError(
                    f"the engine has {human_bytes(manifest.size)}",
                    f"this file system would need as much again in {kept.parent}",
                    "put KVLATHE_CACHE on the engine's own Btrfs or XFS",
                )
            prune(max_bytes=most - manifest.size)
            for name in (*manifest.files, manifests.MANIFEST_FILE):
                _copy(folder / name, work / name)
    except (OSError, KvlatheError) as error:
        log.warning("this build is not cached: %s", error)


def room() -> int:
    """Bytes that kept engines may take: half of theirs and the disk's free ones
    together, at most LIMIT_BYTES. A disk that is nearly full is not filled by them."""
    theirs = sum(entry.size for entry in entries())
    return min(LIMIT_BYTES, (theirs + shutil.disk_usage(root()).free) // 2)


def checkpoint_of(file: Path, write: Callable[[Path], None]) -> Path:
    """The folder that ``write`` fills for a GGUF file: made once, and again where the
    file has changed. Raises KvlatheError where the cache cannot be written."""
    about = file.stat()
    facts = {
        "file": str(file.absolute()),
        "touched": (about.st_size, about.st_mtime_ns, about.st_ino),
    }
    kept = root() / "checkpoints" / key_of(facts)
    try:
        _make_marked(kept.parent)
        with _alone(kept.parent):
            if not kept.is_dir():
                with appearing(kept) as work:
                    (work / MARKER).touch()
                    write(work)
    except OSError as error:
        raise KvlatheError(
            f"{kept.parent} cannot be written",
            f"config and tokenizer of a GGUF file are put there ({error})",
            "set KVLATHE_CACHE to a folder that can be written",
        ) from error
    return kept


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """One process at a time."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_checkpoint(folder: Path) -> bool:
    """Whether ``checkpoint_of`` has made it."""
    return folder.parent == root() / "checkpoints" and _is_ours(folder)


def keep_file(kept: Path, save: Callable[[Path], None]) -> None:
    """Write a calibration into the cache through ``save``. A cache that cannot be
    written only warns."""
    try:
        _make_marked(kept.parent)
        with whole_file(kept) as part:
            save(part)
    except (OSError, KvlatheError) as error:
        log.warning("%s is not cached: %s", kept.name, error)


def _copy(source: Path, target: Path) -> None:
    """A file of its own that shares its blocks with ``source`` where the file system
    can do that."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _shares_blocks(source, target):
        shutil.copyfile(source, target)


def _shares_blocks(source: Path, target: Path) -> bool:
    """Make ``target`` a file that shares its blocks with ``source``; False where that
    cannot be: not on this file system, or on two."""
    with source.open("rb") as original, target.open("wb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, original.fileno())
        except OSError:
            return False
    return True


def entries() -> list[Entry]:
    """All cached engines, the most recently used first. Unreadable ones are left
    out."""
    listed = []
    for folder in _named("engines"):
        manifest = _manifest(folder)
        if manifest is not None:
            entry = Entry(
                folder.name, folder, manifest, manifest.size, folder.stat().st_mtime
            )
            listed.append(entry)
    return sorted(listed, key=lambda entry: -entry.last_used)


def _manifest(folder: Path) -> Manifest | None:
    """None where this version cannot read it."""
    try:
        return manifests.read(folder)
    except KvlatheError:
        return None


def _named(store: str) -> Iterator[Path]:
    """Paths that this cache has put into one of its folders."""
    folder = root() / store
    for path in sorted(folder.glob("*")):
        if not re.fullmatch(STORES[store], path.name) or path.is_symlink():
            continue
        if _is_ours(path if path.is_dir() else folder):
            yield path


@dataclass(frozen=True, slots=True)
class Pruned:
    """``removed`` engines, and what was ``left`` because this cache did not make it.
    ``outdated``: removed folders of engines whose manifests have an older schema."""

    removed: list[Entry]
    left: list[Path]
    outdated: list[Path]


def prune(
    older_than_days: float | None = None,
    max_bytes: int | None = None,
    everything: bool = False,
) -> Pruned:
    """Remove the cached engines not used for ``older_than_days``, then the least
    recently used beyond ``max_bytes``.

    ``everything`` also empties calibration results and curves. Only what this cache has
    marked is removed; engine folders that were built are not touched. Engines whose
    manifests have an older schema go in any case. Those that cannot be read now, or
    belong to a newer version, stay.
    """
    outdated = [path for path in _named("engines") if manifests.is_outdated(path)]
    for folder in outdated:
        _remove(folder)
    removed = []
    held = 0
    for entry in entries():
        age = time.time() - entry.last_used
        old = older_than_days is not None and age > older_than_days * 86400
        big = max_bytes is not None and held + entry.size > max_bytes
        if everything or old or big:
            _remove(entry.folder)
            removed.append(entry)
        else:
            held += entry.size
    return Pruned(removed, _empty() if everything else [], outdated)


def _remove(path: Path) -> None:
    """Remove a calibration, or a marked folder but for what an engine's manifest does
    not list."""
    if not path.is_dir():
        path.unlink()
        return
    listed = manifests.listed_files(path)
    kept = [] if listed is None else foreign(path, listed | {MARKER})
    if not kept:
        shutil.rmtree(path, ignore_errors=True)
        return
    log.warning("%s keeps %s, which is not its own", path, ", ".join(kept))
    for name in (listed or set()) | {MARKER}:
        (path / name).unlink(missing_ok=True)


def _empty() -> list[Path]:
    """Remove all of ours. Returns what else lies in the cache's folders."""
    left: list[Path] = []
    for store in STORES:
        for path in list(_named(store)):
            _remove(path)
        folder = root() / store
        others = [path for path in folder.glob("*") if path.name != MARKER]
        left += others
        if not others and _is_ours(folder):
            shutil.rmtree(folder)
        elif not others and folder.is_dir():
            left.append(folder)
    return sorted(left)
