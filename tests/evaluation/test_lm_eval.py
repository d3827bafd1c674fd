"""lm-evaluation-harness drives an engine and finds what the model of transformers
finds."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig
from tests.support.runtime_cases import MODEL

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
# tests of the harness itself: they run where it is installed
pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: pip install '.[lm-eval]'"
)
ROOT = MODEL.parents[1]
DOCUMENTS = [
    json.loads(line)["text"]
    for line in (ROOT / "data" / "eval_text.jsonl").read_text("utf-8").split("\n")[:6]
]
CHOICES = [" the", " of", "()", "\n"]
PAIRS = [(text[at : at + 300], CHOICES) for text in DOCUMENTS for at in (500, 1500)]

TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{long}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{long}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm_eval") / "engine"
    return build(
        BuildConfig(
            MODEL, folder, "none", kv_bits=32, max_input_len=600, max_seq_len=700
        )
    )


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task files of the harness over one local data set."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"context": context, "choices": choices, "long": text[:3000]}
        for (context, choices), text in zip(PAIRS, 2 * DOCUMENTS, strict=True)
    ]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), "utf-8"
    )
    for name, settings in TASKS.items():
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        }
        task = {"task": f"local_{name}", "test_split": "test", **data, **settings}
        (folder / f"{name}.yaml").write_text(json.dumps(task), "utf-8")  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def reference() -> Any:  # noqa: ANN401
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def encode() -> Any:  # noqa: ANN401
    return transformers.AutoTokenizer.from_pretrained(MODEL).encode


@torch.inference_mode()
def likelihood(
    reference: Any,  # noqa: ANN401
    context: list[int],
    continuation: list[int],
) -> tuple[float, bool]:
    tokens = torch.tensor([[*context, *continuation]])
    logp = reference(tokens[:, :-1]).logits[0, len(context) - 1 :].log_softmax(-1)
    targets = torch.tensor(continuation)
    return float(logp.gather(1, targets[:, None]).sum()), bool(
        (logp.argmax(-1) == targets).all()
    )


@pytest.fixture(scope="module")
def found(engine: Path, tasks: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of all tasks, as the harness's own Python API returns them."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    importlib.import_module("kvlathe.evaluation.lm_eval_adapter")  # registers the model

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    arguments = {"engine": str(engine), "threads": 1}
    names = [f"local_{name}" for name in TASKS]
    result = simple_evaluate(
        "kvlathe", arguments, names, task_manager=manager, bootstrap_iters=0
    )
    assert result is not None
    return result["samples"]


def test_likelihoods_are_those_of_the_model(
    found: dict[str, Any],
    reference: Any,  # noqa: ANN401
    encode: Any,  # noqa: ANN401
) -> None:
    for sample in found["local_choice"]:
        context, choices = sample["doc"]["context"], sample["doc"]["choices"]
        for choice, ((ours, greedy),) in zip(choices, sample["resps"], strict=True):
            spaces = context[len(context.rstrip()) :]
            before, both = (
                encode(context.rstrip()),
                encode(context.rstrip() + spaces + choice),
            )
            expected, said = likelihood(reference, before, both[len(before) :])
            assert float(ours) == pytest.approx(expected, abs=2e-3) and str(
                greedy
            ) == str(said)


def test_whole_texts_are_scored_in_windows_of_the_longest_input(
    found: dict[str, Any],
    reference: Any,  # noqa: ANN401
    encode: Any,  # noqa: ANN401
) -> None:
    for sample in found["local_rolling"][:3]:
        tokens = encode(sample["doc"]["long"], add_special_tokens=False)
        prefix = (
            reference.config.bos_token_id
            if reference.config.bos_token_id is not None
            else reference.config.eos_token_id
        )
        assert len(tokens) > 600
        stream, expected, at = [prefix, *tokens], 0.0, 0
        while at < len(tokens):
            count = min(600, len(tokens) - at)
            start = (
                at if count == 600 else max(0, at + count - 600)
            )  # the last window keeps its full context
            expected += likelihood(
                reference, stream[start : at + 1], stream[at + 1 : at + 1 + count]
            )[0]
            at += count
        assert float(sample["resps"][0][0]) == pytest.approx(expected, rel=1e-4)


def test_answers_are_greedy_and_stop(
    found: dict[str, Any],
    reference: Any,  # noqa: ANN401
    encode: Any,  # noqa: ANN401
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    for sample in found["local_write"]:
        prompt = torch.tensor([encode(sample["doc"]["context"])])
        with torch.inference_mode():
            out = reference.generate(
                prompt, max_new_tokens=12, do_sample=False, pad_token_id=0
            )[0, prompt.shape[1] :]
        assert (
            sample["resps"][0][0]
            == tokenizer.decode(out, skip_special_tokens=True).split("\n")[0]
        )


def test_the_harness_s_command_line_runs_an_engine(
    engine: Path, tasks: Path, tmp_path: Path
) -> None:
    wanted = [
        "--model",
        "kvlathe",
        "--model_args",
        f"engine={engine},threads=1",
        "--tasks",
        "local_choice",
    ]
    wanted += [
        "--include_path",
        str(tasks),
        "--limit",
        "4",
        "--output_path",
        str(tmp_path / "out"),
    ]
    command = [
        sys.executable,
        "-m",
        "kvlathe.evaluation.lm_eval_adapter",
        "run",
        *wanted,
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "local_choice" in done.stdout
    (written,) = (tmp_path / "out").rglob("results*.json")
    assert (
        0
        <= json.loads(written.read_text("utf-8"))["results"]["local_choice"]["acc,none"]
        <= 1
    )


def test_sampling_is_what_a_task_asks_for() -> None:
    from kvlathe.evaluation.lm_eval_adapter import sampling_params

    assert sampling_params({"until": "x", "max_gen_toks": 9}).stop == ("x",)
    assert sampling_params({"until": ["a", ""]}).max_new_tokens == 256
    greedy = sampling_params({"do_sample": False, "temperature": 0.9})
    assert (
        greedy.temperature == 0
        and sampling_params({"temperature": 0.9}).temperature == 0.9
    )
    assert np.isclose(
        sampling_params({"do_sample": True, "temperature": 0.5, "top_p": 0.9}).top_p,
        0.9,
    )


def test_model_args_without_an_engine_are_refused() -> None:
    from kvlathe.evaluation.lm_eval_adapter import EngineLM

    with pytest.raises(KvlatheError, match="model_args has no engine"):
        EngineLM.create_from_arg_obj({"threads": 1})
