"""Words to a user of engines on several GPUs, where there is none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.show import inspect_command
from kvlathe.engines.build import BuildConfig, build
from kvlathe.plan import manifest as manifests
from kvlathe.plan.deal import deal
from kvlathe.plan.engine_folder import open_engine
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.torch_cuda.model.weights import (
    decoder_shapes,
    read_decoder,
)
from kvlathe.runtime.sessions.torch_cuda.shards.slices import Slices
from tests.support.runtime_cases import MODEL, built_folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "engine"
    asked = BuildConfig(
        MODEL,
        folder,
        backend="cuda",
        max_seq_len=512,
        use_cache=False,
        tensor_parallel_size=2,
    )
    return build(asked)


def test_inspect_shows_what_each_gpu_holds(engine: Path) -> None:
    options = [str(engine), "--json", "--tensor-parallel-size", "2"]
    done = CliRunner().invoke(inspect_command, options)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["shards"]
    dealt = deal(open_engine(engine).plan, 2)
    assert [row["filled"] for row in rows] == list(dealt.filled(512))
    assert [row["heads"] for row in rows] == [4, 4]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs")
def test_refusals_say_what_would_do(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(KvlatheError, match="needs a GPU"):
        LLM.load(engine, tensor_parallel_size=2)
    with pytest.raises(KvlatheError, match=r"dealt to 5 shards.*at most 4 shards"):
        LLM.load(engine, tensor_parallel_size=5)
    with pytest.raises(KvlatheError, match="tensor_parallel_size is 0"):
        LLM.load(engine, tensor_parallel_size=0)
    host = built_folder(tmp_path)
    with pytest.raises(KvlatheError, match=r"on 2 GPUs.*onnxruntime.*--backend cuda"):
        LLM.load(host, tensor_parallel_size=2)
    options = [str(host), "--tensor-parallel-size", "2"]
    refused = CliRunner().invoke(inspect_command, options).exception
    assert isinstance(refused, KvlatheError) and "--backend cuda" in str(refused)
    wrong = BuildConfig(MODEL, tmp_path / "x", tensor_parallel_size=2)
    with pytest.raises(KvlatheError, match="runs on one device"):
        build(wrong)
    many = dataclasses.replace(wrong, backend="cuda", tensor_parallel_size=5)
    with pytest.raises(KvlatheError, match="at most 4 shards"):
        build(many)
    assert not (tmp_path / "x").exists()


def test_shards_read_every_weight_once(engine: Path) -> None:
    """Every weight that is cut; norms are everywhere, and shard 0 has what is added
    once."""
    dealt = deal(open_engine(engine).plan, 2)
    name = manifests.DECODER_FILE
    shapes = decoder_shapes(engine, name)
    whole = read_decoder(engine, name, "cpu")[1]
    parts = [read_decoder(engine, name, "cpu", Slices(dealt, r))[1] for r in (0, 1)]
    for key, tensor in whole.items():
        assert shapes[key].shape == tensor.shape
        here = [part[key] for part in parts if key in part]
        if key.endswith(("_norm.weight", "o.bias", "norm.weight")) or "rope" in key:
            assert torch.equal(here[0], tensor)
            continue
        assert sum(x.numel() for x in here) == tensor.numel(), key
        found = torch.cat([x.flatten() for x in here]).double().sort().values
        assert torch.equal(found, tensor.flatten().double().sort().values)
