"""A manifest proves its folder: what was written verifies, and any single change is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kvlathe.engines import manifest as manifests
from kvlathe.engines.manifest import KvBytes, Limits, Manifest
from kvlathe.errors import KvlatheError


def sample() -> Manifest:
    return Manifest(
        model="tiny",
        compression="none",
        backend="onnxruntime",
        versions={"onnxruntime": "1"},
        architectures=("cpu",),
        compute_dtype="float32",
        limits=Limits(max_batch_size=2, max_num_tokens=64, max_input_len=32, max_seq_len=64),
        page_tokens=16,
        prefill_chunk=32,
        kv_bytes=KvBytes(per_token=64.0, baseline=128.0, baseline_16bit=64.0),
        plan_digest="p",
        model_digest="m",
        command="kvlathe build",
        created="2000-01-01T00:00:00Z",
    )


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "model.onnx").write_bytes(bytes(range(256)))
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "notes.txt").write_text("x")
    manifests.write(tmp_path, sample())
    return tmp_path


def test_written_manifest_reads_back_equal_and_verifies(engine: Path) -> None:
    read = manifests.read(engine)
    assert dataclasses.replace(read, files={}) == sample()
    assert set(read.files) == {"plan.json", "model.onnx", "extra/notes.txt"}
    assert read.size == 2 + 256 + 1
    assert manifests.verify(engine) == manifests.verify(engine, deep=False) == read
    assert read.kv_bytes.removed == 0.5


@pytest.mark.parametrize("name", ["plan.json", "model.onnx", "extra/notes.txt"])
def test_any_flipped_bit_is_named(engine: Path, name: str) -> None:
    data = bytearray((engine / name).read_bytes())
    data[0] ^= 1
    (engine / name).write_bytes(bytes(data))
    manifests.verify(engine, deep=False)  # the quick check promises sizes only
    with pytest.raises(KvlatheError, match=f"{name}.*has changed.*SHA-256"):
        manifests.verify(engine)


@pytest.mark.parametrize("deep", [True, False])
def test_truncated_and_missing_files_are_named(engine: Path, deep: bool) -> None:
    (engine / "model.onnx").write_bytes(b"short")
    with pytest.raises(KvlatheError, match=r"model\.onnx.*5 bytes and had 256"):
        manifests.verify(engine, deep)
    (engine / "model.onnx").unlink()
    with pytest.raises(KvlatheError, match=r"model\.onnx is missing"):
        manifests.verify(engine, deep)


@pytest.mark.parametrize(("key", "value"), [("schema_version", 99), ("kvlathe_version", "99.0.0")])
def test_other_versions_are_refused_with_the_remedy(engine: Path, key: str, value: object) -> None:
    edit(engine, **{key: value})
    with pytest.raises(KvlatheError, match=r"was built by kvlathe .*build the engine again"):
        manifests.read(engine)


def test_a_patch_release_reads_engines_of_its_minor_version(engine: Path) -> None:
    major, minor, _ = sample().kvlathe_version.split(".")
    edit(engine, kvlathe_version=f"{major}.{minor}.99")
    manifests.verify(engine)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kvlathe_version": 1}', "\x00"])
def test_malformed_manifests_are_refused(engine: Path, text: str) -> None:
    (engine / "manifest.json").write_text(text)
    with pytest.raises(KvlatheError, match="malformed"):
        manifests.read(engine)


def test_unknown_fields_and_plain_folders_are_refused(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    edit(engine, surprise=1)
    with pytest.raises(KvlatheError, match="malformed"):
        manifests.read(engine)
    with pytest.raises(KvlatheError, match="is not an engine folder"):
        manifests.read(tmp_path_factory.mktemp("plain"))


def edit(engine: Path, **changes: object) -> None:
    path = engine / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
