"""Manifest: what an engine folder holds, what built it, what it may be asked, and the
digests that prove it.

    engine/ manifest.json  plan.json  model.onnx  model.onnx.data  tokenizer.json ...
    (or *.engine)

The manifest lists every file that an engine is read from, and carries a digest of
itself: a changed file and a changed limit are noticed alike. The digests find damage
and careless edits. They do not tell who built an engine: whoever can write the folder
can sign it again.

This module imports the standard library alone, so that loading an engine can check it
before anything else.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvlathe.base.digests import pieces_digest
from kvlathe.base.errors import KvlatheError
from kvlathe.base.package import __version__
from kvlathe.plan import json_fields, replacing
from kvlathe.plan.json_fields import Count, Positive, PositiveFloat, Sha256
from kvlathe.plan.measurement import Measurement

log = logging.getLogger("kvlathe")
SCHEMA_VERSION = 6
MANIFEST_FILE = "manifest.json"
PLAN_FILE = "plan.json"
ONNX_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"
DECODER_FILE = "decoder.json"
ENGINE_FILE = "model.engine"
BASIS_FILE = "basis.npz"
HEADS_FILE = "heads.npz"
REPORT_FILE = "report.html"
EVALUATION_FILE = "evaluation.json"
LAST_HIDDEN, GIVEN = "last_hidden", "given"
"""Names of hidden states in graphs: those that the head reads, and those that a layer
that guesses tokens is given."""
REPLACEABLE = (EVALUATION_FILE, REPORT_FILE)
"""Files that may change after the build: nothing runs from them."""
REFUSED: Mapping[int, str] = {
    errno.EACCES: "let this process read it",
    errno.EPERM: "let this process read it",
    errno.EIO: "look at the disk: the file may be sound",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
}
"""Errors that a system has for files that may be sound, and the remedy."""
MOST_BYTES = 1 << 24
"""The most bytes of a manifest: a larger one is none of ours."""

GRAPHS: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": (),
    "tensorrt": (ENGINE_FILE,),
    "tensorrt_rtx": (ENGINE_FILE,),
    "cuda": (DECODER_FILE, WEIGHTS_FILE),
    "vllm": (HEADS_FILE,),
}
"""Files that each backend's engine must hold beside its plan. ONNX Runtime's graphs are
named by the plan (plan/engine_folder.py)."""

READ_SUFFIXES = {".json", ".jinja", ".onnx", ".data", ".engine", ".npz", ".html"}
"""Kinds of files that an engine is read from: none may lie in the folder unlisted."""


class Unreadable(KvlatheError):
    """The system does not let a file be read that may be sound."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """``sha256``: of the file's pieces (kvlathe/base/digests.py)."""

    size: Count  # bytes
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class Limits:
    """The profile: what one step and one sequence may ask of this engine. Tokens,
    except the batch (sequences)."""

    max_batch_size: Positive
    max_num_tokens: Positive  # of one packed step
    max_input_len: Positive
    max_seq_len: Positive  # prompt and answer


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of KV cache a token, all padding and metadata counted.

    ``baseline`` is the uncompressed model's K and V in the same hot format,
    ``baseline_16bit`` in 16 bit; no padding.
    """

    per_token: PositiveFloat
    baseline: PositiveFloat
    baseline_16bit: PositiveFloat

    @property
    def removed(self) -> float:
        """Fraction of the baseline's bytes removed (same number format on both
        sides)."""
        return (self.baseline - self.per_token) / self.baseline


@dataclass(frozen=True, slots=True)
class Manifest:
    """``architectures``: what the engine runs on ("cpu", or compute capabilities such
    as "sm_89"). ``weights``: the number format of those of the layers' maps.

    ``plan_digest`` is CompressionPlan.digest (the meaning; the file's own digest is in
    ``files``), ``model_digest`` names the checkpoint's weights, ``versions`` the
    libraries that built it. ``made_from`` records plan, ONNX file and weights as
    exported: a backend may have put its own form in their place. ``measured``: what the
    plan loses beside the uncompressed model; None where nobody measured it.
    ``reads_hidden``: it is a layer of a model that guesses tokens for the whole model.
    ``created`` is UTC, ISO 8601. ``digest``: SHA-256 of all other fields, filled in by ``write``.
    """

    model: str
    compression: str
    backend: str
    versions: Mapping[str, str]
    architectures: tuple[str, ...]
    compute_dtype: str
    weights: str
    limits: Limits
    page_tokens: Positive
    prefill_chunk: Positive
    kv_bytes: KvBytes
    plan_digest: str
    model_digest: str
    command: str
    created: str
    reads_hidden: bool = False
    measured: Measurement | None = None
    made_from: Mapping[str, FileRecord] = dataclasses.field(default_factory=dict)
    files: Mapping[str, FileRecord] = dataclasses.field(default_factory=dict)
    kvlathe_version: str = __version__
    schema_version: Count = SCHEMA_VERSION
    digest: str = ""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they were exported."""
        record = self.made_from.get(WEIGHTS_FILE)
        return record.size if record else 0

    @property
    def size(self) -> int:
        """Bytes of all files, the manifest itself aside."""
        return sum(record.size for record in self.files.values())


def record_of(path: Path) -> FileRecord:
    return FileRecord(path.stat().st_size, pieces_digest(path))


def describe_files(
    folder: Path, known: Mapping[str, FileRecord] | None = None
) -> dict[str, FileRecord]:
    """Size and digest of every file of ``folder``, the manifest itself aside.
    ``known``: of files that have not changed since."""
    known = known or {}
    return {
        name: known.get(name) or record_of(folder / name) for name in _names(folder)
    }


def _names(folder: Path) -> list[str]:
    """Files of ``folder`` and of the folders in it, the manifest itself aside."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [name for name in names if name != MANIFEST_FILE]


def signature(raw: Mapping[str, object]) -> str:
    """SHA-256 of a manifest's canonical JSON: sorted keys, no blanks, no ``digest``."""
    signed = {key: value for key, value in raw.items() if key != "digest"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# -- write -----------------------------------------------------------------------------
def write(
    folder: Path, manifest: Manifest, known: Mapping[str, FileRecord] | None = None
) -> Manifest:
    """Record every file of ``folder`` in the manifest (unless it holds records;
    ``known`` as in describe_files), sign it and write it. Returns it complete."""
    files = manifest.files or describe_files(folder, known)
    listed = dataclasses.replace(manifest, files=files, digest="")
    # What JSON makes of it is what a reader will see: lists in place of tuples.
    raw = json.loads(json.dumps(dataclasses.asdict(listed)))
    complete = dataclasses.replace(listed, digest=signature(raw))
    raw["digest"] = complete.digest
    new = replacing.fresh(folder / MANIFEST_FILE)
    new.write_text(json.dumps(raw, indent=1) + "\n", "utf-8")
    new.replace(folder / MANIFEST_FILE)
    return complete


def replace_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write some of REPLACEABLE, by name, into a finished engine, so that a process may
    be killed at any moment (replacing.py). Two processes take turns.

    Raises OSError where the folder cannot be written.
    """
    with replacing.locked(folder):
        manifest = read(folder)
        _finish_replacing(folder, manifest)
        for name, text in texts.items():
            replacing.fresh(folder / name).write_text(text, "utf-8")
        records = {name: record_of(replacing.fresh(folder / name)) for name in texts}
        write(
            folder, dataclasses.replace(manifest, files={**manifest.files, **records})
        )
        for name in texts:
            replacing.fresh(folder / name).replace(folder / name)


def _finish_replacing(folder: Path, manifest: Manifest) -> set[str]:
    records = {name: manifest.files.get(name) for name in REPLACEABLE}
    return replacing.finish(folder, records, record_of)


# -- read ------------------------------------------------------------------------------
def read(folder: Path) -> Manifest:
    """The manifest of an engine folder.

    Raises KvlatheError where there is none, or one of another version, that is
    malformed, or that was changed after it was written.
    """
    path = folder / MANIFEST_FILE
    raw = _raw(folder)
    _check_version(folder, raw.get("kvlathe_version"), raw.get("schema_version"))
    try:
        manifest = json_fields.read(Manifest, raw, "manifest")
    except ValueError as error:
        raise _malformed(path, error) from error
    if signature(raw) != manifest.digest:
        raise _changed(
            f"{path} has changed", "its digest is not that of what it says now"
        )
    return manifest


def listed_files(folder: Path) -> set[str] | None:
    """Names of all that a build wrote into ``folder``, by a manifest of any version.
    None where there is no manifest that can be read."""
    try:
        files = _raw(folder).get("files")
    except KvlatheError:
        return None
    return {*files, MANIFEST_FILE} if isinstance(files, dict) else None


def is_outdated(folder: Path) -> bool:
    """Whether the manifest can be read and names a schema older than this one."""
    try:
        version = _raw(folder).get("schema_version")
    except KvlatheError:
        return False
    return isinstance(version, int) and version < SCHEMA_VERSION


def _raw(folder: Path) -> dict[str, object]:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        _check_is_no_model(folder)
        raise KvlatheError(
            f"{folder} is not an engine folder",
            f"it has no {MANIFEST_FILE}",
            "name a folder that kvlathe build has written",
        )
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        raw = json_fields.parse(path.read_text("utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise _malformed(path, error) from error
    return raw


def _check_is_no_model(folder: Path) -> None:
    """Raise KvlatheError for what is no folder, and for a model that is not built."""
    if not folder.exists():
        raise KvlatheError(
            f"{folder} does not exist",
            "there is no such folder",
            "name a folder that kvlathe build has written",
        )
    is_model = (folder / "config.json").is_file() or folder.suffix == ".gguf"
    if is_model:
        raise KvlatheError(
            f"{folder} is a model and no engine folder",
            "engines are built of models",
            f"run kvlathe build --model {folder} --output-dir ENGINE, and name ENGINE",
        )


def _malformed(path: Path, error: Exception) -> KvlatheError:
    if isinstance(error, OSError) and (number := error.errno or 0) in REFUSED:
        fact = f"{error.filename} cannot be read"
        return Unreadable(fact, os.strerror(number).lower(), REFUSED[number])
    return KvlatheError(
        f"{path} cannot be read",
        f"it is malformed ({error})",
        "build the engine again",
    )


def _check_version(folder: Path, version: object, schema: object) -> None:
    """A patch release reads the engines of its minor version; nothing else is promised
    before 1.0."""
    if version is None or schema is None:
        raise _malformed(folder / MANIFEST_FILE, ValueError("it names no version"))
    same_minor = str(version).split(".")[:2] == __version__.split(".")[:2]
    if schema == SCHEMA_VERSION and same_minor:
        return
    raise KvlatheError(
        f"the engine {folder} was built by kvlathe {version} (schema {schema})",
        f"this is kvlathe {__version__} (schema {SCHEMA_VERSION})",
        "build the engine again with this version",
    )


# -- verify ----------------------------------------------------------------------------
def verify(folder: Path, deep: bool = True) -> Manifest:
    """Read the manifest and prove that every file it lists is the one that was built,
    and that no file lies beside them that an engine is read from.

    ``deep`` compares digests (0.6 s a GB and core: the default, since a wrong weight is
    silent); otherwise sizes only, for weights on slow or trusted storage. Raises
    KvlatheError naming the first file that is missing, changed, outside the folder or
    not listed.
    """
    manifest = read(folder)
    if deep:
        log.info("verifying %s", folder)
    try:
        _check_listed(folder, manifest)
        for name in manifest.files:
            _check_inside(folder, name)
        unfinished = _finish_replacing(folder, manifest)
        for name, record in manifest.files.items():
            if name not in unfinished:
                _check_file(folder, name, record, deep)
    except (OSError, ValueError) as error:  # names that no file system takes
        raise _malformed(folder / MANIFEST_FILE, error) from error
    return manifest


def require_listed(folder: Path, manifest: Manifest, names: tuple[str, ...]) -> None:
    """Raise KvlatheError where a file that will be read is not in the manifest."""
    for name in names:
        if name not in manifest.files:
            raise _changed(
                f"{name} of the engine {folder} is not in its manifest",
                "a file that nothing vouches for is not read",
            )


def _check_listed(folder: Path, manifest: Manifest) -> None:
    needed = GRAPHS.get(manifest.backend)
    if needed is None:
        raise _changed(
            f"the engine {folder} is of the backend {manifest.backend!r}",
            f"there are {', '.join(GRAPHS)}",
        )
    require_listed(folder, manifest, (PLAN_FILE, *needed))
    there = (name for name in _names(folder) if Path(name).suffix in READ_SUFFIXES)
    require_listed(folder, manifest, tuple(there))


def _check_inside(folder: Path, name: str) -> None:
    """Refuse names and links that lead out of the folder, before any byte is read."""
    plain = PurePosixPath(name)
    leaves = plain.is_absolute() or ".." in plain.parts or "\0" in name
    # Path.resolve raises RuntimeError for a link that leads to itself.
    home = Path(os.path.realpath(folder))
    if leaves or not Path(os.path.realpath(folder / name)).is_relative_to(home):
        raise _changed(
            f"the manifest of the engine {folder} lists {name!r}",
            "it lies outside the folder",
        )


def _check_file(folder: Path, name: str, record: FileRecord, deep: bool) -> None:
    path = folder / name
    if not path.is_file():
        raise _changed(
            f"{name} is missing from the engine {folder}", "its manifest lists it"
        )
    size = path.stat().st_size
    if size != record.size:
        raise _changed(
            f"{name} of the engine {folder} has changed",
            f"it has {size:,} bytes and had {record.size:,}",
        )
    if deep and pieces_digest(path) != record.sha256:
        raise _changed(
            f"{name} of the engine {folder} has changed",
            "its SHA-256 is not the one in the manifest",
        )


def _changed(fact: str, reason: str) -> KvlatheError:
    return KvlatheError(
        fact, reason, "copy the engine folder again, or build the engine again"
    )
