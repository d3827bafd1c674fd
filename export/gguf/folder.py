"""A checkpoint folder of a GGUF file: config and tokenizer as files, and a link to the
file for the weights."""

from __future__ import annotations

import json
from pathlib import Path

from kvlathe.export.gguf.config import read_config
from kvlathe.export.gguf.file import GgufFile, require_library
from kvlathe.export.gguf.tokenizer import tokenizer_files


def write_checkpoint(path: Path, folder: Path) -> None:
    """Fill ``folder``. Raises KvlatheError for a file that cannot be read as a
    checkpoint."""
    require_library()
    file = GgufFile(path)
    (folder / "config.json").write_text(
        json.dumps(read_config(file), indent=1), "utf-8"
    )
    for name, content in tokenizer_files(file).items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        (folder / name).write_text(text, "utf-8")
    (folder / path.name).symlink_to(path.absolute())
