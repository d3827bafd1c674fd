"""The version of this program, the folder that it is installed in, and its data."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.2.0"
FOLDER = Path(__file__).resolve().parents[1]
"""kvlathe/ itself: in a checkout its parent is the checkout."""
DATA = FOLDER / "data" if (FOLDER / "data").is_dir() else FOLDER.parent / "data"
"""Texts and questions that calibrate and measure where a user gives none. A wheel has them
inside the package, a checkout beside it."""
