"""Digests are those of hashlib, whatever the pieces and the number of threads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.base import digests


@settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(content=st.binary(max_size=200), blocks=st.integers(1, 4))
def test_a_digest_in_pieces_is_that_of_the_pieces_digests(
    content: bytes, blocks: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BLOCK", 16)
        patch.setattr(digests, "PIECE", 16 * blocks)
        found = digests.pieces_digest(path)
        size = digests.PIECE
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    whole = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    expected = content if len(content) <= size else whole
    assert found == hashlib.sha256(expected).hexdigest()


def test_a_file_is_hashed_again_once_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(path.name.encode())
    expected = [hashlib.sha256(name).hexdigest() for name in (b"a", b"b")]
    assert digests.sha256_files(paths) == expected
    with monkeypatch.context() as patch:
        patch.setattr(digests, "sha256_file", lambda _: pytest.fail("read again"))
        assert digests.sha256_files(paths) == expected
    paths[1].write_bytes(b"more")
    assert digests.sha256_files(paths)[1] == hashlib.sha256(b"more").hexdigest()
