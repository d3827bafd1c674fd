"""Remembered losses are whole or measured again."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
import pytest

from kvlathe.export.search.remembered import recall, remember

FORMS = np.arange(12.0).reshape(3, 4)


def test_remembered_losses_come_back_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "losses" / "a.npz"
    assert recall(path, 1) is None
    remember(path, FORMS, -FORMS)
    kept = recall(path, 2)
    assert kept is not None
    np.testing.assert_array_equal(kept, [FORMS, -FORMS])
    assert recall(path, 3) is None
    remember(None, FORMS)
    assert recall(None, 1) is None


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    remember(path, FORMS)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert recall(path, 1) is None
    at = whole.index(FORMS.tobytes())
    path.write_bytes(whole[:at] + b"x" + whole[at + 1 :])
    assert recall(path, 1) is None


def test_a_stopped_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npz"
    remember(path, FORMS)

    def stopped(file: IO[bytes], *_arrays: np.ndarray) -> None:
        file.write(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", stopped)
    with pytest.raises(KeyboardInterrupt):
        remember(path, -FORMS)
    assert list(tmp_path.iterdir()) == [path]
    kept = recall(path, 1)
    assert kept is not None
    np.testing.assert_array_equal(kept[0], FORMS)
