"""The style that all pages share: report.html and the page of the suite."""

from __future__ import annotations

from pathlib import Path

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
"""CSS, for a <style> element: light and dark, print, and phones from 360 px on."""
