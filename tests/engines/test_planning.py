"""Warnings of planning about a model, before anything is folded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.engines import planning
from kvlathe.engines.config import BuildConfig
from kvlathe.engines.order import accept
from kvlathe.engines.planning import open_checkpoint, plan_for
from kvlathe.engines.pricing import cache_settings
from kvlathe.export.model.spec import read_spec
from tests.support import checkpoints

Reference = Callable[[str], tuple[Path, torch.nn.Module]]


def request(model: Path, compression: str = "none") -> BuildConfig:
    return BuildConfig(
        model,
        model / "engine",
        compression=compression,
        calibration=None if compression == "none" else "random",
        use_cache=False,
    )


@pytest.mark.parametrize(("served", "said"), [(64, False), (512, True)])
def test_longrope_beyond_its_short_factors_is_said_and_kept_in_the_plan(
    served: int, said: bool, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = reference("phi3-longrope")
    warnings: list[str] = []
    monkeypatch.setattr(
        planning.log, "warning", lambda text, *args: warnings.append(text % args)
    )
    plan = plan_for(accept(request(folder)), open_checkpoint(folder, served)).plan
    assert len(warnings) == said
    assert ("differ from transformers" in plan.notes.get("rope", "")) == said


def test_options_beyond_the_model_are_refused_before_calibration(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = reference("llama")
    monkeypatch.setattr(planning, "calibrated", None)  # not called
    asked = request(folder, "uncomp:removed=2")
    with pytest.raises(KvlatheError, match="a layer has 2 KV heads"):
        plan_for(accept(asked), open_checkpoint(folder))


def test_a_tokenizer_that_no_engine_could_load_is_refused_at_once(
    tmp_path: Path,
) -> None:
    checkpoints.make(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").write_text("garbage")
    with pytest.raises(KvlatheError, match=r"tokenizer_config.json cannot be read"):
        open_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["t97"] = 97
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(
        KvlatheError, match=r"ids up to 97.*embeddings of the tokens 0 to 96"
    ):
        open_checkpoint(tmp_path)


def test_a_chat_template_that_cannot_run_is_refused_at_once(tmp_path: Path) -> None:
    checkpoints.make(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(KvlatheError, match=r"chat template.*cannot run: line 1.*chat"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("backend", "dtype", "aged"),
    [
        ("onnxruntime", None, True),
        ("onnxruntime", "float16", False),
        ("cuda", "float16", False),
    ],
)
def test_older_tokens_get_fewer_bits_only_where_no_gpu_reads_the_engine(
    backend: str, dtype: str | None, aged: bool, reference: Reference
) -> None:
    folder, _ = reference("llama-dynamic")
    config = dataclasses.replace(request(folder), backend=backend, dtype=dtype)
    assert cache_settings(config, read_spec(folder)).aged is aged
