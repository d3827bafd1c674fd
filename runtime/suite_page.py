"""The examination of an engine (suite.py) as one self-contained page: bytes, scores, heat maps of line retrieval."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from kvlathe.console import cell, human_bytes

TEMPLATE = Path(__file__).with_name("suite.html.j2")
HUES = 0, 130
"""Degrees: of nothing right, and of all."""


def colour(share: float) -> str:
    """Red through yellow to green."""
    return f"hsl({HUES[0] + share * (HUES[1] - HUES[0]):.0f} 70% 65%)"


def write_page(result: Mapping[str, Any], path: Path) -> None:
    """``result`` of run_suite as HTML."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False)
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    path.write_text(template.render(**result, human=human_bytes, cell=cell, colour=colour), "utf-8")
