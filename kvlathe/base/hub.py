"""Checkpoints by their name on the Hugging Face Hub.

Only what a build reads is fetched: weights as safetensors or one GGUF file, the
tokenizer, the configs.
Nothing that is fetched is executed. huggingface_hub downloads, keeps its cache, goes on
where a download broke off, and shows bars; HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT
and HF_HUB_OFFLINE mean to it what they mean everywhere.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.base.gguf_files import SUFFIX, gguf_of, is_model, several
from kvlathe.base.json_files import read_object
from kvlathe.base.tokenizer_files import FILES

PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
NAME = re.compile(rf"(?!.*(?:\.\.|--)){PART}/{PART}")
"""Names as the Hub takes them."""
FILE = re.compile(rf"((?!.*(?:\.\.|--)){PART}/{PART})/([^/]+\.gguf)")
"""A GGUF file of one."""
INDEX = "model.safetensors.index.json"
WANTED = ("config.json", "*.safetensors", INDEX, *FILES)
UNWANTED = ("*/*", "consolidated*")
"""Folders hold other forms of the same weights, and so do consolidated files."""
SHOWN = 3
"""Folders that are named beside a mistyped one."""
SNAPSHOTS = "snapshots"
REPOSITORY = "models--"


def checkpoint_folder(model: Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: ``model`` itself where there is one, else what the
    Hub has under the name ``org/name``, at a branch, a tag or a commit. A GGUF file is
    one, too, and on the Hub ``org/name/FILE.gguf``.

    Raises KvlatheError for a revision of a folder, a name that the Hub does not have or
    does not give, one without safetensors and one GGUF file, what is missing without a
    network, and what looks like a mistyped folder: of that the Hub is not told.
    """
    name, file = model.as_posix(), ""
    if found := FILE.fullmatch(name):
        name, file = found[1], found[2]
    if model.exists() or not is_name(model):
        if revision is not None:
            raise KvlatheError(
                f"--revision {revision} cannot be had",
                "a folder has no revisions",
                "leave --revision out, or give a name such as org/model",
            )
        return model
    if revision is None and model.parent.is_dir():
        raise _mistyped(model)
    log.info("%s is no folder here: asking the Hub", name)
    if file:
        return _fetched(name, revision, (file,)) / file
    folder = _fetched(name, revision)
    if not any(folder.glob("*.safetensors")) and gguf_of(folder) is None:
        folder = _with_gguf(name, revision, folder)
    if missing := missing_files(folder):
        raise KvlatheError(
            f"{name} is not whole in {folder}",
            f"{', '.join(missing[:4])} {'is' if len(missing) == 1 else 'are'} missing",
            "run this again with a network, or look whether the Hub has them",
        )
    return folder


def is_name(model: Path) -> bool:
    """Whether a path may be the name of a model, or of a GGUF file, on the Hub."""
    name = model.as_posix()
    if FILE.fullmatch(name):
        return True
    return NAME.fullmatch(name) is not None and not name.endswith(SUFFIX)


def _mistyped(model: Path) -> KvlatheError:
    """The error for a name that is missing in a folder that is there."""
    others = sorted(path.name for path in model.parent.iterdir() if path.is_dir())
    near = difflib.get_close_matches(model.name, others, SHOWN) or others[:SHOWN]
    reason = f"there is a folder {model.parent}, and nothing of that name in it"
    if near:
        reason += f", but {', '.join(near)}"
    return KvlatheError(
        f"there is no checkpoint folder {model}",
        reason,
        "name a folder, or say --revision main to ask the Hub for it",
    )


def model_name(folder: Path) -> str:
    """A checkpoint's name: its folder's, its GGUF file's, or the Hub's for a
    snapshot."""
    if file := gguf_of(folder):
        return file.stem
    whole = folder.resolve()
    repository = whole.parent.parent.name
    if whole.parent.name == SNAPSHOTS and repository.startswith(REPOSITORY):
        return repository.rsplit("--", 1)[1]
    return whole.name


def missing_files(folder: Path) -> list[str]:
    """Files that a build needs and the folder does not have."""
    wanted = ["config.json"]
    if (folder / INDEX).is_file():
        shards = read_object(folder / INDEX).get("weight_map")
        if isinstance(shards, dict):
            wanted += sorted({str(shard) for shard in shards.values()})
    missing = [name for name in wanted if not (folder / name).is_file()]
    if gguf_of(folder) is not None:
        return []
    if len(wanted) == 1 and not any(folder.glob("*.safetensors")):
        missing.append("a file of weights (*.safetensors; pickles are not read)")
    return missing


def _with_gguf(name: str, revision: str | None, folder: Path) -> Path:
    """A snapshot without weights, with the GGUF file that the Hub has beside it, if it
    has one. Raises KvlatheError for several."""
    if offline():
        return folder
    from huggingface_hub import HfApi

    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        listed = api.list_repo_files(name, revision=revision)
    except Exception as error:  # its errors have no common class
        raise _refusal(name, revision, error) from error
    files = [path for path in sorted(listed) if "/" not in path and is_model(path)]
    if len(files) > 1:
        raise several(name, files)
    return _fetched(name, revision, (*WANTED, *files)) if files else folder


def _fetched(name: str, revision: str | None, wanted: tuple[str, ...] = WANTED) -> Path:
    """The Hub's snapshot on this machine, with the files ``wanted``."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise KvlatheError(
            f"{name} is no folder, and the Hub cannot be asked",
            f"{error.name} is not installed",
            f"run {pip_install('export')}, or give a folder",
        ) from error
    from kvlathe.base.console import err

    if not err.is_terminal:
        disable_progress_bars()
    try:
        found = snapshot_download(
            name,
            revision=revision,
            cache_dir=os.environ.get("HF_HUB_CACHE"),
            endpoint=os.environ.get("HF_ENDPOINT"),
            allow_patterns=[*wanted],
            ignore_patterns=[*UNWANTED],
            local_files_only=offline(),
        )
    except Exception as error:  # its errors have no common class
        raise _refusal(name, revision, error) from error
    assert isinstance(found, str)
    return Path(found)


def offline() -> bool:
    """Whether the user forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _refusal(name: str, revision: str | None, error: Exception) -> KvlatheError:
    """An error of huggingface_hub in words."""
    from huggingface_hub import errors

    at = f" at {revision}" if revision else ""
    fact = f"{name}{at} is no folder, and cannot be had from the Hub"
    if isinstance(error, errors.GatedRepoError):
        reason = "its owner lets only some have it"
        remedy = "accept its terms on the Hub, and set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = "there is no such model, or it is private"
        remedy = "look at the name; for a private one set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason, remedy = "there is no such revision", "look at the name"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        lines = str(error).splitlines()
        silent = "its files are not all on this machine, and HF_HUB_OFFLINE is set"
        reason = silent if offline() else f"the network did not answer ({lines[0]})"
        remedy = "fetch it with a network first, or give a folder"
    else:
        lines = str(error).splitlines() or [type(error).__name__]
        reason, remedy = lines[0][:300], "try again: what was fetched is kept"
    return KvlatheError(fact, reason, remedy)
