"""Files of a checkpoint folder that hold its weights: safetensors or a GGUF file, and
no pickles."""

from __future__ import annotations

import json
from pathlib import Path

from kvlathe.base.adapters import PICKLES
from kvlathe.base.errors import KvlatheError
from kvlathe.base.gguf_files import gguf_of

DOWNLOAD = "download the checkpoint again"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint folder, or its GGUF file. Raises
    KvlatheError if there are none, and for pickled weights."""
    lone = folder / "model.safetensors"
    if lone.is_file():  # as transformers: it goes before shards beside it
        return (lone,)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _shards(index)
    if gguf := gguf_of(folder):
        return (gguf,)
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickled:
        raise KvlatheError(
            f"the weights in {folder} are pickled ({pickled[0]})",
            "reading a pickle can run code hidden in it",
            "convert them where you trust them: load them with transformers and call save_pretrained",
        )
    raise KvlatheError(
        f"{folder} has no weights",
        "it holds neither model.safetensors nor its index",
        DOWNLOAD,
    )


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        shards = sorted(
            {
                str(name)
                for name in json.loads(index.read_text(encoding="utf-8"))[
                    "weight_map"
                ].values()
            }
        )
    except (
        OSError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        raise KvlatheError(
            f"{index} cannot be read", f"{type(error).__name__}: {error}", DOWNLOAD
        ) from error
    for shard in shards:
        if Path(shard).name != shard:
            raise KvlatheError(
                f"{index} names the file {shard!r}",
                "weights lie in the checkpoint's folder",
                DOWNLOAD,
            )
        if not (index.parent / shard).is_file():
            raise KvlatheError(
                f"the weight file {index.parent / shard} is missing",
                f"{index.name} names it",
                DOWNLOAD,
            )
    return tuple(index.parent / shard for shard in shards)
