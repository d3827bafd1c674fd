"""What a build request gets where it says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.cli.build import build_command
from kvlathe.engines.backends import ON_A_CPU, ON_A_GPU
from kvlathe.engines.request import BuildRequest


def request(**fields: Any) -> BuildRequest:  # noqa: ANN401
    return BuildRequest(Path("model"), Path("engine"), **fields)


@pytest.mark.parametrize(
    ("backend", "sizes"), [("onnxruntime", (8, 512, 520)), ("cuda", (256, 2048, 8192))]
)
def test_sizes_of_a_step_are_those_of_the_backend(
    backend: str, sizes: tuple[int, int, int]
) -> None:
    asked = request(backend=backend)
    limits = asked.limits(4096)
    found = (limits.max_batch_size, asked.chunk, limits.max_num_tokens)
    assert found == sizes


def test_the_help_of_a_build_says_the_sizes() -> None:
    said = " ".join(CliRunner().invoke(build_command, ["--help"]).output.split())
    cpu, gpu = ON_A_CPU, ON_A_GPU
    for words in (
        f"{cpu.batch}; {gpu.batch} for cuda",
        f"{cpu.chunk}; {gpu.chunk} for cuda",
        f"{gpu.tokens} for cuda",
    ):
        assert words in said


@given(
    backend=st.sampled_from(["onnxruntime", "cuda", "tensorrt"]),
    page=st.sampled_from([16, 64, 96, 128]),
    tokens=st.none() | st.integers(128, 20_000),
    batch=st.none() | st.integers(1, 128),
)
def test_a_default_never_contradicts_what_was_asked(
    backend: str, page: int, tokens: int | None, batch: int | None
) -> None:
    """A step holds a chunk of whole pages, and a token of every sequence."""
    asked = request(
        backend=backend,
        tokens_per_block=page,
        max_num_tokens=tokens,
        max_batch_size=batch,
    )
    limits = asked.limits(4096)
    assert asked.chunk % page == 0
    assert limits.max_num_tokens >= max(asked.chunk, asked.batch)
    assert tokens is None or limits.max_num_tokens == tokens
    assert batch is None or limits.max_batch_size == batch
