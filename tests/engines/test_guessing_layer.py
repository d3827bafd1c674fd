"""Laws of engines of layers that guess tokens: they are built by --mtp, and what cannot
be one is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.build import build_command
from kvlathe.engines.build import BuildConfig
from kvlathe.engines.config import check
from kvlathe.engines.order import accept
from kvlathe.engines.planning import open_checkpoint
from kvlathe.plan import manifest as manifests
from kvlathe.runtime.drafting.guessing_layer import GuessingLayer
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.checkpoints import make, make_model
from tests.support.drafts import whatever_is_guessed
from tests.support.families import FAMILIES
from tests.support.guessing_cases import (
    BESIDE,
    ONE_FULL_LAYER,
    WEIGHTS,
    make_guessing,
)

SHORT = ("--max-seq-len", "256", "--no-cache")


@pytest.mark.slow
def test_a_built_layer_guesses_for_the_engine_of_its_model(tmp_path: Path) -> None:
    """By the command line, in codes. Nothing else loads it."""
    folder, engine, layer = (tmp_path / name for name in ("model", "engine", "layer"))
    make_guessing(folder, quiet=True)
    given = ["--model", str(folder), *SHORT, "--output-dir"]
    for words in (
        [*given, str(engine), "--no-measure"],
        [*given, str(layer), "--mtp", "--compression", "hack:bits=8"],
    ):
        done = CliRunner().invoke(build_command, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    described = [manifests.verify(path) for path in (engine, layer)]
    assert [one.reads_hidden for one in described] == [False, True]
    assert described[0].model_digest == described[1].model_digest
    with pytest.raises(KvlatheError, match="no engine of a whole model"):
        LLM.load(layer)
    llm = LLM.load(engine, threads=1, device="cpu")
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    prompts = [np.random.default_rng(1).integers(0, 97, n).tolist() for n in (9, 70)]
    plain = llm.generate(prompts, params)
    llm.speculate(layer, 4)
    speculation = llm.engine.scheduler.speculation
    assert isinstance(speculation.drafter, GuessingLayer)
    whatever_is_guessed(speculation)
    answers = llm.generate(prompts, params)
    assert [x.token_ids for x in answers] == [x.token_ids for x in plain]
    assert speculation.accepted > 0.5 * speculation.drafted > 50
    llm.close()


def test_layers_that_guess_are_refused_where_there_are_none_or_no_rows_for_them(
    tmp_path: Path,
) -> None:
    make_guessing(tmp_path / "model")
    make(tmp_path / "llama", "llama")
    model, target = tmp_path / "model", tmp_path / "engine"
    asked = BuildConfig(model, target, mtp=True)
    with pytest.raises(KvlatheError, match="no rows that read hidden states"):
        check(replace(asked, backend="vllm"))
    for refused in (
        replace(asked, lora=("adapter",)),
        replace(asked, enable_lora=True),
        replace(asked, max_kl=0.1),
    ):
        with pytest.raises(KvlatheError, match="no whole model"):
            check(refused)
    for compression in ("fdc", "auto"):
        with pytest.raises(KvlatheError, match="fitted to texts"):
            accept(BuildConfig(model, target, compression, mtp=True))
    with pytest.raises(KvlatheError, match="it is known where models of"):
        open_checkpoint(tmp_path / "llama", mtp=True)
    with pytest.raises(KvlatheError, match="there are no tensors"):
        open_checkpoint(model / "alone", mtp=True)
    shutil.rmtree(model / "alone")
    assert open_checkpoint(model).spec.gives_hidden
    assert not open_checkpoint(tmp_path / "llama").spec.gives_hidden


def test_layers_that_guess_are_found_beside_parts_that_read_images(
    tmp_path: Path,
) -> None:
    """Qwen3.5: the model of texts is a part, and the layer lies beside all parts."""
    _, settings = FAMILIES["qwen3_5"]
    make(tmp_path / "model", "qwen3_5")
    alone = settings["text_config"] | ONE_FULL_LAYER
    make_model(tmp_path / "alone", "Qwen3_5Text", alone, seed=1)
    assert not open_checkpoint(tmp_path / "model").spec.gives_hidden
    stored, block = (
        load_file(tmp_path / name / WEIGHTS) for name in ("model", "alone")
    )
    tensors = {name: tensor.clone() for name, tensor in stored.items()}
    for name, tensor in block.items():
        if name.startswith("model.layers.0."):
            tensors[name.replace("model.", "mtp.", 1)] = tensor.clone()
    norm = block["model.norm.weight"]
    for name in (BESIDE.embed_norm, BESIDE.hidden_norm, BESIDE.norm):
        tensors[f"{name}.weight"] = norm.clone()
    tensors[f"{BESIDE.join}.weight"] = torch.randn(len(norm), 2 * len(norm))
    save_file(tensors, tmp_path / "model" / WEIGHTS, {"format": "pt"})
    assert open_checkpoint(tmp_path / "model").spec.gives_hidden
    layer = open_checkpoint(tmp_path / "model", mtp=True)
    assert layer.spec.layers == 1
    assert layer.spec.reads_hidden
    joined = layer.weight("guess_join.weight")
    assert torch.equal(joined, tensors[f"{BESIDE.join}.weight"].T)
    embedded = stored["model.language_model.embed_tokens.weight"]
    assert torch.equal(layer.weight("embed.weight"), embedded)
