"""docs/methods.md lists the methods that there are, with the options that they
declare."""

from __future__ import annotations

import re

from kvlathe.export.methods.options import options_of
from kvlathe.export.methods.registry import methods
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "methods.md"
ROW = re.compile(
    r"^\| (`[a-z0-9`, ]+`)[^|]*\|([^|]*)\|((?:\\.|[^|\\])*)\|", re.MULTILINE
)
NAMED = re.compile(r"`([^`]*)`")


def rows() -> dict[str, str]:
    """The options of each method, as the table says them."""
    table = PAGE.read_text("utf-8").partition("\n## ")[0]
    found: dict[str, str] = {}
    for names, _, options in ROW.findall(table):
        for name in NAMED.findall(names):
            found[name] = options.strip()
    return found


def cell(name: str) -> str:
    """Every option as a user may write it, the default first."""
    declared = options_of(methods()[name].options)
    words = [one.written.replace("|", "\\|") for one in declared]
    return ", ".join(f"`{word}`" for word in words) or "none"


def test_every_method_is_in_the_table() -> None:
    assert rows().keys() == methods().keys() - {"none"}


def test_the_table_has_the_options_that_methods_declare() -> None:
    alike: dict[str, str] = {}
    for name, said in rows().items():
        own = cell(name)
        wanted = "the same" if own in alike and said.startswith("the same") else own
        assert said == wanted or said.startswith((f"{wanted} (", f"{wanted};")), name
        alike[own] = name
