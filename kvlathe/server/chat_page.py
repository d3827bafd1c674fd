"""The page at /: a chat, and the cache beside it. It loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

import jinja2

from kvlathe.base.pages import STYLE

TEMPLATE = Path(__file__).with_name("chat.html.j2")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Content-Security-Policy: a browser holds the page to that."""


def chat_page(model: str) -> str:
    """HTML of the page for the served ``model``."""
    environment = jinja2.Environment(autoescape=True)
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    return template.render(model=model, style=STYLE)
