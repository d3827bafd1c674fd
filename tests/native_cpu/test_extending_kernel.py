"""The example of docs/extending/kernel.md runs as it stands in the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlathe.runtime.native import library
from kvlathe.runtime.native.library import Found, Native

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending" / "kernel.md"


def test_the_example_of_the_kernel_page_runs(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(code) == 1
    monkeypatch.setattr(library, "find", lambda: Found(native))
    exec(compile(code[0], str(PAGE), "exec"), {})
