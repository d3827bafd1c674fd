"""Extras of kvlathe: packages that only some commands need. Commands that install
them."""

from __future__ import annotations

from pathlib import Path

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
