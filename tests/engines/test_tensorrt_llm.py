"""Why there is no backend tensorrt_llm, held against TensorRT-LLM's own source.

Its source is not ours to ship: KVLATHE_TENSORRT_LLM names a folder with it (0.11 to
1.2, the releases with trtllm-build).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"cu_seqlens_q", "query_offsets", "lengths", "page_table_", "pool_"}
"""First words of our attention's inputs that its runtime must feed (docs/attend.md)."""


@pytest.fixture
def source() -> Path:
    folder = os.environ.get("KVLATHE_TENSORRT_LLM")
    if not folder:
        pytest.skip("TensorRT-LLM's source: KVLATHE_TENSORRT_LLM names no folder")
    return Path(folder)


def test_a_build_for_tensorrt_llm_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    request = BuildConfig(
        ROOT / "models/lathe-5m", tmp_path / "engine", backend="tensorrt_llm"
    )
    with pytest.raises(KvlatheError) as refused:
        build(request)
    assert "never seals a page" in str(refused.value)
    assert "--backend hf" in str(refused.value)
    assert not any(tmp_path.iterdir())


def inputs(module: Path) -> Iterator[str]:
    """Names of the network inputs that a module of TensorRT-LLM declares, up to the
    first number in them."""
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Tensor":
            for keyword in node.keywords:
                if keyword.arg == "name":
                    yield ast.unparse(keyword.value).lstrip("f").strip("'\"")


def test_networks_of_tensorrt_llm_get_an_address_and_none_of_our_inputs(
    source: Path,
) -> None:
    found = set(inputs(source / "tensorrt_llm/models/generation_mixin.py"))
    assert {"host_kv_cache_pool_pointers", "kv_cache_block_offsets"} <= found
    assert not [name for name in found if name.startswith(tuple(NEEDED))]


def test_attention_of_tensorrt_llm_casts_the_address(source: Path) -> None:
    plugins = source / "cpp/tensorrt_llm/plugins/gptAttentionPlugin"
    text = (plugins / "gptAttentionPlugin.cpp").read_text("utf-8")
    assert "HOST_KV_CACHE_POOL_POINTERS" in text
    assert "getAliasedInput" not in text
