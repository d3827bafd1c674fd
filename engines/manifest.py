"""Manifest: what an engine folder holds, what built it, what it may be asked, and the digests that prove it.

    engine/ manifest.json  plan.json  model.onnx  model.onnx.data  tokenizer.json ...  (or *.engine)

This module imports the standard library alone, so that loading an engine can check it before anything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlathe import __version__
from kvlathe.errors import KvlatheError

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
PLAN_FILE = "plan.json"
ONNX_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
DECODER_FILE = "decoder.json"
ENGINE_FILE = "model.engine"
BASIS_FILE = "basis.npz"
REPORT_FILE = "report.html"


@dataclass(frozen=True, slots=True)
class FileRecord:
    size: int  # bytes
    sha256: str  # hex


@dataclass(frozen=True, slots=True)
class Limits:
    """The profile: what one step and one sequence may ask of this engine. Tokens, except the batch (sequences)."""

    max_batch_size: int
    max_num_tokens: int  # of one packed step
    max_input_len: int
    max_seq_len: int  # prompt and answer


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of KV cache a token, all padding and metadata counted.

    ``baseline`` is the uncompressed model's K and V in the same hot format, ``baseline_16bit`` in 16 bit; no padding.
    """

    per_token: float
    baseline: float
    baseline_16bit: float

    @property
    def removed(self) -> float:
        """Fraction of the baseline's bytes removed (same number format on both sides)."""
        return (self.baseline - self.per_token) / self.baseline


@dataclass(frozen=True, slots=True)
class Manifest:
    """``architectures``: what the engine runs on ("cpu", or compute capabilities such as "sm_89").

    ``plan_digest`` is CompressionPlan.digest (the meaning; the file's own digest is in ``files``), ``model_digest``
    names the checkpoint's weights, ``versions`` the libraries that built it. ``made_from`` records plan, ONNX file and
    weights as exported: a backend may have put its own form in their place. ``created`` is UTC, ISO 8601.
    """

    model: str
    compression: str
    backend: str
    versions: Mapping[str, str]
    architectures: tuple[str, ...]
    compute_dtype: str
    limits: Limits
    page_tokens: int
    prefill_chunk: int
    kv_bytes: KvBytes
    plan_digest: str
    model_digest: str
    command: str
    created: str
    made_from: Mapping[str, FileRecord] = dataclasses.field(default_factory=dict)
    files: Mapping[str, FileRecord] = dataclasses.field(default_factory=dict)
    kvlathe_version: str = __version__
    schema_version: int = SCHEMA_VERSION

    @property
    def size(self) -> int:
        """Bytes of all files, the manifest itself aside."""
        return sum(record.size for record in self.files.values())


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe_files(folder: Path) -> dict[str, FileRecord]:
    """Size and digest of every file of ``folder``, the manifest itself aside."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(folder).as_posix(): FileRecord(path.stat().st_size, sha256_file(path)) for path in paths}


def write(folder: Path, manifest: Manifest) -> Manifest:
    """Record every file of ``folder`` in the manifest (unless it holds records) and write it. Returns it complete."""
    complete = manifest if manifest.files else dataclasses.replace(manifest, files=describe_files(folder))
    (folder / MANIFEST_FILE).write_text(json.dumps(dataclasses.asdict(complete), indent=1) + "\n", "utf-8")
    return complete


def read(folder: Path) -> Manifest:
    """The manifest of an engine folder. Raises KvlatheError where there is none, or one of another version."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise KvlatheError(
            f"{folder} is not an engine folder",
            f"it has no {MANIFEST_FILE}",
            "name a folder that kvlathe build has written",
        )
    try:
        raw: dict[str, Any] = json.loads(path.read_text("utf-8"))
        _check_version(folder, str(raw["kvlathe_version"]), raw["schema_version"])
        return Manifest(
            **{
                **raw,
                "architectures": tuple(raw["architectures"]),
                "limits": Limits(**raw["limits"]),
                "kv_bytes": KvBytes(**raw["kv_bytes"]),
                "made_from": _records(raw["made_from"]),
                "files": _records(raw["files"]),
            }
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise KvlatheError(
            f"{path} cannot be read", f"it is malformed ({error!r})", "build the engine again"
        ) from error


def _records(raw: Mapping[str, Mapping[str, Any]]) -> dict[str, FileRecord]:
    return {str(name): FileRecord(**record) for name, record in raw.items()}


def _check_version(folder: Path, version: str, schema: object) -> None:
    """A patch release reads the engines of its minor version; nothing else is promised before 1.0."""
    if schema == SCHEMA_VERSION and version.split(".")[:2] == __version__.split(".")[:2]:
        return
    raise KvlatheError(
        f"the engine {folder} was built by kvlathe {version} (schema {schema})",
        f"this is kvlathe {__version__} (schema {SCHEMA_VERSION})",
        "build the engine again with this version",
    )


def verify(folder: Path, deep: bool = True) -> Manifest:
    """Read the manifest and prove that every file it lists is the one that was built.

    ``deep`` compares digests (about 0.6 s a GB: the default, since a wrong weight is silent); otherwise sizes only,
    for weights on slow or trusted storage. Raises KvlatheError naming the first missing or changed file.
    """
    manifest = read(folder)
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise _changed(f"{name} is missing from the engine {folder}", "its manifest lists it")
        if path.stat().st_size != record.size:
            raise _changed(
                f"{name} of the engine {folder} has changed",
                f"it has {path.stat().st_size:,} bytes and had {record.size:,}",
            )
        if deep and sha256_file(path) != record.sha256:
            raise _changed(f"{name} of the engine {folder} has changed", "its SHA-256 is not the one in the manifest")
    return manifest


def _changed(fact: str, reason: str) -> KvlatheError:
    return KvlatheError(fact, reason, "copy the engine folder again, or build the engine again")
