"""Pointers that Git leaves in place of large files, where Git LFS was not there to fetch
them."""

from __future__ import annotations

from pathlib import Path

from kvlathe.base.errors import KvlatheError

POINTER = b"version https://git-lfs.github.com/spec/"
"""A pointer begins with it (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""


def refuse_pointer(path: Path) -> None:
    """Raise KvlatheError for a pointer. What cannot be opened is refused by who reads
    it."""
    try:
        with path.open("rb") as stream:
            is_pointer = stream.read(len(POINTER)) == POINTER
    except OSError:
        return
    if is_pointer:
        raise KvlatheError(
            f"{path} cannot be read",
            "it is a pointer of Git LFS: the file itself was not fetched",
            "run git lfs install and git lfs pull in the clone, or fetch it with "
            "huggingface_hub",
        )
