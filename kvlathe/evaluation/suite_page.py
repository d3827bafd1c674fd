"""The examination of an engine (suite.py) as one self-contained page: bytes, scores,
heat maps of line retrieval."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from kvlathe.base.console import cell, human_bytes
from kvlathe.base.pages import STYLE

TEMPLATE = Path(__file__).with_name("suite.html.j2")
HUES = 0, 130
"""Degrees: of nothing right, and of all."""


def colour(share: float) -> str:
    """Red through yellow to green."""
    first, last = HUES
    hue = first + share * (last - first)
    return f"hsl({hue:.0f} 70% 65%)"


def write_page(
    result: Mapping[str, Any], path: Path, report: Path | None = None
) -> None:
    """``result`` of run_suite as HTML. ``report``: the engine's own page, to link to."""
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False
    ).from_string(TEMPLATE.read_text("utf-8"))
    page = template.render(
        **result,
        report=_link(path, report),
        style=Markup(STYLE),
        human=human_bytes,
        cell=cell,
        colour=colour,
    )
    path.write_text(page, "utf-8")


def _link(page: Path, report: Path | None) -> str | None:
    """The report's address, as a link on the page; None where there is no report."""
    if report is None or not report.is_file():
        return None
    return quote(os.path.relpath(report.resolve(), page.resolve().parent))
