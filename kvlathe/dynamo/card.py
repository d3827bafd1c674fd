"""The card of a model, for frontends: its tokenizer and a config.json. Engines keep no
config.json, so the few fields that a frontend reads are written from the manifest.

Frontends refuse workers of one model whose cards lie in different places, so the place
follows from the content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import mkdtemp

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.cache import root
from kvlathe.runtime.llm import LLM

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
COPIED = (
    TOKENIZER,
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files of an engine that go into the card, as far as it has them."""


def card_of(engine: Path, llm: LLM) -> Path:
    """A folder under the cache's root (engines/cache.py). Raises KvlatheError where it
    cannot be written."""
    files = {CONFIG: _config(llm)}
    for name in COPIED:
        source = engine / name
        if source.exists():
            files[name] = source.read_bytes()
    if TOKENIZER in files:  # with the tokens that other files declare
        files[TOKENIZER] = llm.tokenizer.backend.to_str().encode()
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    folder = root() / "dynamo" / digest.hexdigest()[:16]
    try:
        _write(folder, files)
    except OSError as error:
        raise KvlatheError(
            "frontends would find no tokenizer",
            f"{folder} cannot be written ({error.strerror})",
            "set KVLATHE_CACHE",
        ) from error
    return folder


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """All at once: another worker may read it already."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(mkdtemp(dir=folder.parent))
    for name, data in files.items():
        (made / name).write_bytes(data)
        (made / name).replace(folder / name)
    made.rmdir()


def _config(llm: LLM) -> bytes:
    config: dict[str, object] = {"model_type": "llama"}  # any that frontends know
    config["architectures"] = ["LlamaForCausalLM"]
    config["vocab_size"] = llm.plan.model.vocab_size
    config["max_position_embeddings"] = llm.limits.max_seq_len
    config["eos_token_id"] = sorted(llm.tokenizer.eos_ids)
    return json.dumps(config, indent=1).encode()
