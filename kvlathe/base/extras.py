"""Extras of kvlathe: packages that only some commands need. Commands that install
them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from kvlathe.base.errors import KvlatheError

CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder that holds the package: a checkout, or a folder of installed packages."""


def pip_install(extra: str, where: Path = CHECKOUT) -> str:
    """The command that installs ``extra`` (a key of pyproject.toml's optional
    dependencies) beside this kvlathe.

    In a checkout it names the checkout: there pip would look for kvlathe elsewhere. An
    installed kvlathe is found by its name.
    """
    if (where / "pyproject.toml").is_file():
        return f"pip install '{where}[{extra}]'"
    return f"pip install 'kvlathe[{extra}]'"


def is_installed(module: str) -> bool:
    """Whether ``module`` can be imported. It is not."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def require(fact: str, extra: str, *modules: str) -> None:
    """Raise KvlatheError with ``fact`` where one of ``modules``, which ``extra``
    installs, is missing. Nothing is imported: a command asks before it works."""
    for module in modules:
        if not is_installed(module):
            raise KvlatheError(
                fact, f"{module} is not installed", f"run {pip_install(extra)}"
            )
