"""Defaults of a build request that says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.build import build_command
from kvlathe.engines.backends import ON_A_CPU, ON_A_GPU
from kvlathe.engines.config import BuildConfig, check
from kvlathe.plan.weight_formats import PLAIN


def request(**fields: Any) -> BuildConfig:  # noqa: ANN401
    return BuildConfig(Path("model"), Path("engine"), **fields)


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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": "int8", "backend": "cuda"}, "Build for onnxruntime"),
        ({"weights": "int4", "backend": "tensorrt_rtx"}, "no product of such weights"),
        ({"weights": "float16"}, "Give --dtype float16"),
        ({"weights": "int3"}, "it is unknown"),
        ({"weights": "fp8"}, "Build for cuda"),
    ],
)
def test_weights_that_a_backend_cannot_multiply_are_refused(
    fields: dict[str, str], words: str, tmp_path: Path
) -> None:
    asked = BuildConfig(tmp_path, tmp_path / "engine", **cast(Any, fields))
    with pytest.raises(KvlatheError, match=words):
        check(asked)
    assert not asked.output_dir.exists()


def test_weights_in_what_the_engine_computes_in_change_nothing() -> None:
    same = request(dtype="float16", weights="float16")
    assert same.weight_formats == request().weight_formats == PLAIN
