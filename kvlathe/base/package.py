"""The version of this program, and the folder that it is installed in."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.2.0"
FOLDER = Path(__file__).resolve().parents[1]
"""kvlathe/ itself: in a checkout its parent is the checkout."""
