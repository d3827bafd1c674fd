"""The site builds without a warning, and holds the API reference."""

from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

MISSING = [
    name for name in ("mkdocs", "material", "mkdocstrings") if not util.find_spec(name)
]


@pytest.mark.nightly
@pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} missing: pip install '.[docs]'"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "api" / "plan.html").read_text(encoding="utf-8")
    assert 'id="kvlathe.plan.plan.CompressionPlan"' in reference
