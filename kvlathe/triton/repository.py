"""A model repository for Triton Inference Server: two models over one engine, written
whole or not at all.

    OUT/NAME/config.pbtxt        token ids in and out, with TensorRT-LLM's tensor names; holds the engine
    OUT/NAME/1/model.py, engine/
    OUT/NAME_text/config.pbtxt   text in and out; calls NAME (business logic scripting)
    OUT/NAME_text/1/model.py, tokenizer/

Both run in Triton's Python backend. docs/triton.md says what each tensor means.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvlathe.base import tokenizer_files
from kvlathe.base.errors import KvlatheError
from kvlathe.engines.folder import appearing
from kvlathe.plan import manifest as manifests

VERSION = "1"
MODEL_FILE = '''"""Written by kvlathe triton-repo."""

from kvlathe.runtime.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output, as Triton names it. ``dims`` leave out the batch (1); -1 is
    any length."""

    name: str
    kind: str  # Triton's TYPE_ names
    dims: tuple[int, ...] = (1,)


TOKEN_INPUTS = (
    Tensor("input_ids", "INT32", (-1,)),
    Tensor("input_lengths", "INT32"),
    Tensor("request_output_len", "INT32"),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),
    Tensor("stop_words_list", "INT32", (2, -1)),
    Tensor("stop_strings", "STRING", (-1,)),
    Tensor("beam_width", "INT32"),
    Tensor("runtime_top_k", "INT32"),
    Tensor("runtime_top_p", "FP32"),
    Tensor("temperature", "FP32"),
    Tensor("random_seed", "UINT64"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("streaming", "BOOL"),
    Tensor("stop", "BOOL"),
)
TOKEN_OUTPUTS = (
    Tensor("output_ids", "INT32", (-1, -1)),
    Tensor("sequence_length", "INT32", (-1,)),
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("text", "STRING"),
    Tensor("finish_reason", "STRING"),
)
TEXT_INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("streaming", "BOOL"),
    Tensor("sampling_param_max_tokens", "INT32"),
    Tensor("sampling_param_temperature", "FP32"),
    Tensor("sampling_param_top_k", "INT32"),
    Tensor("sampling_param_top_p", "FP32"),
    Tensor("sampling_param_repetition_penalty", "FP32"),
    Tensor("sampling_param_seed", "UINT64"),
    Tensor("sampling_param_stop", "STRING", (-1,)),
    Tensor("sampling_param_ignore_eos", "BOOL"),
    Tensor("sampling_param_exclude_input_from_output", "BOOL"),
)
TEXT_OUTPUTS = (Tensor("text_output", "STRING"), Tensor("finish_reason", "STRING"))
REQUIRED = {"text_input"}
"""All else may be left out. A request of ``stop`` alone ends the one of the same id, so
not even input_ids is required by the configuration; the model refuses requests that
need it."""


def write_repository(
    engine: Path,
    target: Path,
    name: str = "kvlathe",
    copy: bool = False,
    streaming: bool = True,
    overwrite: bool = False,
    settings: Mapping[str, object] | None = None,
) -> dict[str, Path]:
    """Write the two models and return their folders by name.

    ``copy``: the repository holds the engine's files; otherwise a link to them.
    ``streaming``: models are decoupled (many responses a request); otherwise one
    response, which plain inference calls can receive. ``settings``: what the token
    model loads the engine with, None left out. Raises KvlatheError where ``engine`` is
    none or takes no text.
    """
    manifest = manifests.verify(engine)
    _check(engine, name)
    entries = {
        key: str(value) for key, value in (settings or {}).items() if value is not None
    }
    with appearing(target, overwrite, lambda folder: _written(folder, name)) as work:
        tokens = work / name / VERSION
        tokens.mkdir(parents=True)
        if copy:
            shutil.copytree(engine, tokens / "engine")
        else:
            (tokens / "engine").symlink_to(engine.resolve(), target_is_directory=True)
        _write_model(
            work / name,
            "triton_tokens",
            TOKEN_INPUTS,
            TOKEN_OUTPUTS,
            streaming,
            entries,
        )
        text = work / f"{name}_text" / VERSION
        (text / "tokenizer").mkdir(parents=True)
        for file in sorted(set(tokenizer_files.FILES) & set(manifest.files)):
            shutil.copyfile(engine / file, text / "tokenizer" / file)
        _write_model(
            text.parent,
            "triton_text",
            TEXT_INPUTS,
            TEXT_OUTPUTS,
            streaming,
            {"token_model": name},
        )
    return {folder: target / folder for folder in (name, f"{name}_text")}


def _written(repository: Path, name: str) -> set[str] | None:
    """Names of what a repository of this model holds. None where there is no such
    model."""
    if not (repository / name / "config.pbtxt").is_file():
        return None
    engine = f"{name}/{VERSION}/engine"
    copied = manifests.listed_files(repository / engine) or set()
    models = (f"{name}", f"{name}_text")
    texts = {f"{name}_text/{VERSION}/tokenizer/{x}" for x in tokenizer_files.FILES}
    configs = {f"{model}/config.pbtxt" for model in models}
    programs = {f"{model}/{VERSION}/model.py" for model in models}
    engines = {engine, *(f"{engine}/{file}" for file in copied)}
    return configs | programs | engines | texts


def _check(engine: Path, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise KvlatheError(
            f"{name!r} cannot name a model",
            "it becomes a folder and part of a URL",
            "use letters, digits, '_', '-' and '.'",
        )
    if not tokenizer_files.has_backend(engine):
        raise KvlatheError(
            f"{engine} has no tokenizer.json",
            "the text model splits text with it",
            "build the engine from a checkpoint that has one",
        )


def _write_model(
    folder: Path,
    module: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    decoupled: bool,
    parameters: Mapping[str, str],
) -> None:
    config = config_text(folder.name, inputs, outputs, decoupled, parameters)
    (folder / "config.pbtxt").write_text(config, "utf-8")
    (folder / VERSION / "model.py").write_text(
        MODEL_FILE.format(module=module), "utf-8"
    )


def config_text(
    name: str,
    inputs: Iterable[Tensor],
    outputs: Iterable[Tensor],
    decoupled: bool,
    parameters: Mapping[str, str],
) -> str:
    """A ``ModelConfig`` message as protobuf text. One instance, batch 1: the engine
    batches requests by itself."""
    lines = [
        f'name: "{name}"',
        'backend: "python"',
        "max_batch_size: 1",
        f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
        *(
            f"input {_tensor(t, '' if t.name in REQUIRED else ' optional: true')}"
            for t in inputs
        ),
        *(f"output {_tensor(t)}" for t in outputs),
        *(
            f"parameters {{ key: {quote(k)} value {{ string_value: {quote(v)} }} }}"
            for k, v in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _tensor(tensor: Tensor, more: str = "") -> str:
    dims = ", ".join(map(str, tensor.dims))
    return f'{{ name: "{tensor.name}" data_type: TYPE_{tensor.kind} dims: [ {dims} ]{more} }}'


def quote(text: str) -> str:
    """A protobuf text string: bytes outside printable ASCII as octal escapes."""
    plain = (
        chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03o}"
        for b in text.encode()
    )
    return f'"{"".join(plain)}"'
