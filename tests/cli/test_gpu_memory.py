"""--gpu-memory-utilization reaches every engine that a command loads, and two that are
loaded together have half each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvlathe.cli.main import cli
from kvlathe.runtime.llm import LLM

COMMANDS = {
    "generate": (["generate", "a", "--prompt", "x"], [0.6]),
    "eval": (["eval", "a", "--text", "t"], [0.6]),
    "eval beside": (["eval", "b", "--baseline", "a", "--text", "t"], [0.3, 0.3]),
    "compare": (["compare", "a", "b"], [0.3, 0.3]),
}


class Enough(Exception):
    """All engines are loaded."""


@pytest.mark.parametrize("name", COMMANDS)
def test_engines_of_a_command_share_the_gpu_memory_that_was_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, shares = COMMANDS[name]
    seen: list[tuple[str, float]] = []

    def load(engine: Path, **options: Any) -> LLM | None:  # noqa: ANN401
        seen.append((str(engine), options["gpu_memory_utilization"]))
        if len(seen) == len(shares):
            raise Enough
        return None

    monkeypatch.setattr(LLM, "load", load)
    found = CliRunner().invoke(cli, [*arguments, "--gpu-memory-utilization", "0.6"])
    assert isinstance(found.exception, Enough)
    assert seen == list(zip("ab", shares, strict=False))
