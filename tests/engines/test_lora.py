"""Engines of a checkpoint with LoRA adapters: other adapters are another engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.build import build_command
from kvlathe.engines import planning
from kvlathe.engines.build import BuildConfig, build, calibrate_to
from kvlathe.engines.config import check
from kvlathe.engines.order import accept
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.plan import manifest as manifests
from kvlathe.runtime.llm import LLM
from tests.support.adapters import change_tensors, write_adapter
from tests.support.checkpoints import make, whole_plan

Folders = tuple[Path, Path]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLATHE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """(checkpoint, adapter), both this test's own."""
    model = make(tmp_path / "model", "llama")
    write_adapter(tmp_path / "adapter", model)
    return tmp_path / "model", tmp_path / "adapter"


def request(folder: Path, *lora: str | Path, **options: Any) -> BuildConfig:  # noqa: ANN401
    engine = folder.parent / "engine"
    return BuildConfig(folder, engine, lora=tuple(map(str, lora)), **options)


def test_another_adapter_is_another_engine(folders: Folders) -> None:
    """The same one in another folder is the same."""
    folder, adapter = folders

    def key(*lora: str | Path) -> str:
        return accept(request(folder, *lora)).key

    keys = [key(), key(adapter), key(f"{adapter}=0.5"), key(adapter, adapter)]
    moved = adapter.rename(adapter.with_name("moved"))
    assert key(moved) == keys[1]
    change_tensors(moved, lambda tensors: next(iter(tensors.values())).mul_(2))
    keys.append(key(moved))
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_an_engine_holds_the_sum(folders: Folders) -> None:
    """By the command line. Its manifest has the digest of checkpoint and adapters."""
    folder, adapter = folders
    target = folder.parent / "adapted"
    lora = (f"{adapter}=0.5", str(adapter))
    words = ["--model", str(folder), "--output-dir", str(target), "--json"]
    words += ["--lora", lora[0], "--lora", lora[1]]
    done = CliRunner().invoke(build_command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    checkpoint = planning.open_checkpoint(folder, lora=lora)
    assert manifests.verify(target).model_digest == checkpoint.digest
    stored = (target / "model.onnx.data").read_bytes()
    assert checkpoint.weight("layers.1.down.weight").numpy().tobytes() in stored


def test_statistics_are_of_the_adapters_too(folders: Folders, tmp_path: Path) -> None:
    folder, adapter = folders
    stats = tmp_path / "stats.npz"
    calibrate_to(folder, stats, "random", lora=(str(adapter),))
    asked = request(folder, adapter, compression="fdc", stats=stats)
    adapted = planning.open_checkpoint(folder, lora=asked.lora)
    assert planning.statistics(accept(asked), adapted) is not None
    with pytest.raises(KvlatheError, match="another model"):
        planning.statistics(accept(asked), planning.open_checkpoint(folder))


@pytest.mark.slow
def test_a_build_for_adapters_takes_them_while_it_runs(folders: Folders) -> None:
    """In pages of 16 bits. What cannot take any is refused before it is built."""
    folder, adapter = folders
    engine = build(request(folder, enable_lora=True, measure=False))
    llm, rows = LLM.load(engine, threads=1, device="cpu"), range(30)
    llm.load_adapter("half", f"{adapter}=0.5")
    merged = planning.open_checkpoint(folder, lora=(f"{adapter}=0.5",))
    plan = whole_plan(merged.spec)
    wanted = decoder_from(merged, plan, Basis()).logits(rows, rows)
    found = llm.logits(rows, rows, adapter="half")
    assert np.abs(found - wanted.numpy()).max() < 0.01
    assert np.abs(llm.logits(rows, rows) - wanted.numpy()).max() > 0.1
    llm.close()
    for backend in ("tensorrt", "vllm"):
        asked = request(folder, enable_lora=True, backend=backend)
        with pytest.raises(KvlatheError, match="no products of adapters"):
            check(asked)
