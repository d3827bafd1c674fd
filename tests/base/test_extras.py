"""The command that a missing package's refusal names is one that pip takes here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from kvlathe.base.extras import CHECKOUT, pip_install
from kvlathe.base.tensorrt_library import FLAVOURS
from tests.test_architecture import sources

ASKED = re.compile(r"pip_install\((.*?)\)|require\(\s*\"[^\"]*\",\s*(.*?),")


def test_a_checkout_is_named_by_its_path_and_an_installed_package_by_its_name(
    tmp_path: Path,
) -> None:
    assert pip_install("serve", tmp_path) == "pip install 'kvlathe[serve]'"
    (tmp_path / "pyproject.toml").touch()
    assert pip_install("serve", tmp_path) == f"pip install '{tmp_path}[serve]'"
    assert f"'{CHECKOUT}[tensorrt]'" in FLAVOURS["tensorrt_rtx"].install


def test_every_extra_that_a_refusal_names_is_there() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    text = "\n".join(path.read_text("utf-8") for path in sources())
    found = {"".join(names).strip("'\"") for names in ASKED.findall(text)}
    named = {name for name in found if name.isidentifier()} - {"extra"}
    assert len(named) >= 7
    assert named <= set(project["optional-dependencies"])
    assert "pip install 'kvlathe[" not in text.replace("[{extra}]", "")
