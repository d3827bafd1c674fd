"""Laws of engines of layers that guess tokens: they are built by --mtp, and what cannot
be one is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

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
from tests.support.checkpoints import make
from tests.support.drafts import whatever_is_guessed
from tests.support.guessing_cases import make_guessing

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
