"""Digests of the native libraries, beside them: made when they are built, and compared
before one is loaded.

The loader maps a library without reading it. One that is cut short or damaged would end
the process with SIGBUS or SIGSEGV, later and without a word. Standard library only:
setup.py uses it too.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

from kvlathe.base.digests import sha256_file
from kvlathe.base.errors import KvlatheError

SUFFIX = ".sha256"
MAGIC, HEADER = b"\x7fELF\x02\x01", 64
"""Beginning and bytes of the header of an ELF file of 64 bits."""


def digest_file(library: Path) -> Path:
    return library.with_name(library.name + SUFFIX)


def check_digest(library: Path) -> None:
    """Raise KvlatheError where a library is not what was built. One without a digest
    was built by somebody else: it must be as long as it says."""
    noted = digest_file(library)
    if noted.is_file():
        words = noted.read_text("ascii", errors="replace").split()
        if words[:1] != [sha256_file(library)]:
            raise _damaged(library, f"its SHA-256 is not the one in {noted.name}")
    elif _is_short(library):
        raise _damaged(library, "the file is shorter than its header says")


def remove_damaged(folder: Path) -> None:
    """Take damaged libraries away, so that they are built anew: a build would find them
    newer than their sources."""
    for library in folder.glob("libkvlathe*.so"):
        try:
            check_digest(library)
        except KvlatheError:
            library.unlink()


def put(library: Path, folder: Path) -> None:
    """Copy a library into ``folder`` beside its digest, by rename: a process that has
    mapped the one before goes on with it."""
    target = folder / library.name
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copy2(library, part)
        digest = f"{sha256_file(part)}  {library.name}\n"
        digest_file(target).unlink(missing_ok=True)  # it is of the one before
        part.replace(target)
        part.write_text(digest, "ascii")
        part.replace(digest_file(target))
    finally:
        part.unlink(missing_ok=True)


def _is_short(library: Path) -> bool:
    """Whether an ELF file ends before its table of sections, which is its last part."""
    with library.open("rb") as file:
        header = file.read(HEADER)
        size = os.fstat(file.fileno()).st_size
    if not header.startswith(MAGIC):
        return False  # the loader says what it is
    if len(header) < HEADER:
        return True
    (table,) = struct.unpack_from("<Q", header, 40)
    entry, count = struct.unpack_from("<HH", header, 58)
    return table + entry * count > size


def _damaged(library: Path, reason: str) -> KvlatheError:
    return KvlatheError(
        f"{library} is damaged", reason, "build it again: kvlathe native"
    )
