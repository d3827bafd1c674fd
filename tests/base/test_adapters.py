"""Adapters as they are asked for on a command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvlathe.base.adapters import Adapter, read_adapter
from kvlathe.base.errors import KvlatheError
from kvlathe.base.lora_file import read_lora, tensor_name


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


@pytest.mark.parametrize("end", ["", "=0.5"])
def test_a_path_that_the_system_takes_for_none_is_refused(end: str) -> None:
    with pytest.raises(KvlatheError, match="File name too long"):
        read_adapter("a" * 300 + end)


def test_an_adapter_is_what_its_files_were_when_they_were_read(tmp_path: Path) -> None:
    """Its numbers and its digest, though the files shrink to nothing."""
    adapter = Adapter(tmp_path)
    config, weights = adapter.files
    said = {"peft_type": "LORA", "r": 2, "target_modules": ["q"]}
    config.write_text(json.dumps(said))
    a, b = np.random.default_rng(0).random((2, 2, 2), np.float32)
    named = {tensor_name("q", "A"): a, tensor_name("q", "B"): b}
    save_file(named, weights)
    read, again = (read_lora(adapter, {"q": (2, 2)}) for _ in range(2))
    halved = read_lora(dataclasses.replace(adapter, weight=0.5), {"q": (2, 2)})
    assert read.digest == again.digest != halved.digest
    weights.write_bytes(b"")
    np.testing.assert_array_equal(read.products[0].a, a)
    np.testing.assert_array_equal(read.products[0].b, b)
    with pytest.raises(KvlatheError, match="truncated or damaged"):
        read_lora(adapter, {"q": (2, 2)})
    save_file({name: array + 1 for name, array in named.items()}, weights)
    assert read_lora(adapter, {"q": (2, 2)}).digest != read.digest
