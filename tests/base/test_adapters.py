"""Adapters as they are asked for on a command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.adapters import Adapter, read_adapter
from kvlathe.base.errors import KvlatheError


@given(weight=st.floats(allow_nan=False, allow_infinity=False))
def test_a_weight_stands_after_the_last_equals_sign(weight: float) -> None:
    assert read_adapter(f"a/b={weight!r}") == Adapter(Path("a/b"), weight)
    assert read_adapter(f"a=b={weight!r}") == Adapter(Path("a=b"), weight)
    assert read_adapter(Path("a/b")) == Adapter(Path("a/b"), 1.0)


def test_a_folder_may_have_the_sign_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "rank=8"
    folder.mkdir()
    assert read_adapter(folder) == Adapter(folder)
    assert read_adapter(f"{folder}=2") == Adapter(folder, 2.0)


@pytest.mark.parametrize("text", ["a=", "a=half", "a=nan", "a=-inf"])
def test_a_weight_is_a_finite_number(text: str) -> None:
    with pytest.raises(KvlatheError, match="is no number"):
        read_adapter(text)
