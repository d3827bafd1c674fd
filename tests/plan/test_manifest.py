"""A manifest proves its folder: what was written verifies, and any single change is
named."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.plan import manifest as manifests
from kvlathe.plan.manifest import KvBytes, Limits, Manifest


def sample() -> Manifest:
    return Manifest(
        model="tiny",
        compression="none",
        backend="onnxruntime",
        versions={"onnxruntime": "1"},
        architectures=("cpu",),
        compute_dtype="float32",
        weights="float32",
        limits=Limits(
            max_batch_size=2, max_num_tokens=64, max_input_len=32, max_seq_len=64
        ),
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
    assert dataclasses.replace(read, files={}, digest="") == sample()
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


@pytest.mark.parametrize(
    ("key", "value"), [("schema_version", 99), ("kvlathe_version", "99.0.0")]
)
def test_other_versions_are_refused_with_the_remedy(
    engine: Path, key: str, value: object
) -> None:
    edit(engine, **{key: value})
    with pytest.raises(
        KvlatheError, match=r"was built by kvlathe .*Build the engine again"
    ):
        manifests.read(engine)


def test_a_patch_release_reads_engines_of_its_minor_version(engine: Path) -> None:
    major, minor, _ = sample().kvlathe_version.split(".")
    resign(engine, kvlathe_version=f"{major}.{minor}.99")
    manifests.verify(engine)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kvlathe_version": 1}', "\x00"])
def test_malformed_manifests_are_refused(engine: Path, text: str) -> None:
    (engine / "manifest.json").write_text(text)
    with pytest.raises(KvlatheError, match="malformed"):
        manifests.read(engine)


def test_unknown_fields_and_plain_folders_are_refused(
    engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    edit(engine, surprise=1)
    with pytest.raises(KvlatheError, match="malformed"):
        manifests.read(engine)
    with pytest.raises(KvlatheError, match="is not an engine folder"):
        manifests.read(tmp_path_factory.mktemp("plain"))


# -- what nothing vouches for ----------------------------------------------------------
@pytest.mark.parametrize(
    "changes",
    [
        {
            "limits": {
                "max_batch_size": 9,
                "max_num_tokens": 64,
                "max_input_len": 32,
                "max_seq_len": 64,
            }
        },
        {"backend": "cuda"},
        {"files": {}},
        {"command": "another"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_manifest_is_noticed(
    engine: Path, changes: dict[str, object]
) -> None:
    edit(engine, **changes)
    with pytest.raises(KvlatheError, match=r"manifest\.json has changed"):
        manifests.read(engine)


@pytest.mark.parametrize("name", ["plan.json", "model.onnx"])
def test_a_file_that_is_not_listed_is_refused(engine: Path, name: str) -> None:
    files = {key: value for key, value in raw(engine)["files"].items() if key != name}
    resign(engine, files=files)
    with pytest.raises(KvlatheError, match=f"{name} of .* is not in its manifest"):
        manifests.verify(engine)
    resign(engine, files={})
    with pytest.raises(KvlatheError, match="is not in its manifest"):
        manifests.verify(engine)


def test_a_file_that_came_later_is_refused_until_it_is_recorded(engine: Path) -> None:
    (engine / "tokenizer.json").write_text("{}")
    (engine / "notes.md").write_text("no engine is read from this")
    with pytest.raises(KvlatheError, match=r"tokenizer\.json of .* is not in its"):
        manifests.verify(engine)
    manifests.write(engine, dataclasses.replace(manifests.read(engine), files={}))
    assert "tokenizer.json" in manifests.verify(engine).files


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../outside", "a/../../outside", "a\0b"]
)
def test_paths_outside_the_folder_are_refused_unread(
    engine: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine.parent / "outside").write_text("x")
    files = raw(engine)["files"]
    resign(engine, files={name: files["extra/notes.txt"], **files})
    monkeypatch.setattr(manifests, "pieces_digest", lambda _: pytest.fail("was read"))
    with pytest.raises(KvlatheError, match="lies outside the folder"):
        manifests.verify(engine)


def test_a_link_that_leads_out_is_refused(
    engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = engine / "model.onnx"
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "model.onnx"
    model.rename(elsewhere)
    model.symlink_to(elsewhere)
    with pytest.raises(KvlatheError, match="lies outside the folder"):
        manifests.verify(engine)
    elsewhere.rename(engine / "inner.bin")
    model.unlink()
    model.symlink_to("inner.bin")
    manifests.verify(engine)


def test_a_link_to_itself_is_refused(engine: Path) -> None:
    (engine / "model.onnx").unlink()
    (engine / "model.onnx").symlink_to("model.onnx")
    with pytest.raises(KvlatheError, match=r"model\.onnx is missing"):
        manifests.verify(engine)


@pytest.mark.parametrize("name", ["x" * 5000, "\ud800", "extra"])
def test_names_that_are_no_files_are_refused_in_words(engine: Path, name: str) -> None:
    files = raw(engine)["files"]
    resign(engine, files={name: files["plan.json"], **files})
    with pytest.raises(KvlatheError):
        manifests.verify(engine)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (
            "limits",
            {
                "max_batch_size": "8",
                "max_num_tokens": 64,
                "max_input_len": 32,
                "max_seq_len": 64,
            },
        ),
        (
            "limits",
            {
                "max_batch_size": 0,
                "max_num_tokens": 64,
                "max_input_len": 32,
                "max_seq_len": 64,
            },
        ),
        ("kv_bytes", {"per_token": 1.0, "baseline": 0.0, "baseline_16bit": 1.0}),
        ("files", {"plan.json": {"size": -1, "sha256": "0" * 64}}),
        ("files", {"plan.json": {"size": 1, "sha256": "no digest"}}),
        ("versions", [["onnxruntime", "1"]]),
        ("architectures", "cpu"),
        ("page_tokens", True),
        ("model", None),
    ],
)
def test_fields_of_another_type_are_refused(
    engine: Path, field: str, value: object
) -> None:
    resign(engine, **{field: value})
    with pytest.raises(KvlatheError, match=f"malformed .*{field}"):
        manifests.read(engine)


def test_a_manifest_that_is_nested_too_deep_or_too_long_is_refused(
    engine: Path,
) -> None:
    (engine / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(KvlatheError, match="malformed"):
        manifests.read(engine)
    (engine / "manifest.json").write_bytes(b" " * (manifests.MOST_BYTES + 1))
    with pytest.raises(KvlatheError, match="more than"):
        manifests.read(engine)


def raw(engine: Path) -> dict[str, Any]:
    return json.loads((engine / "manifest.json").read_text())


def edit(engine: Path, **changes: object) -> None:
    (engine / "manifest.json").write_text(json.dumps(raw(engine) | changes))


def resign(engine: Path, **changes: object) -> None:
    """Change the manifest as somebody would who knows how it is signed."""
    edit(engine, **changes)
    edit(engine, digest=manifests.signature(raw(engine)))


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        (None, "does not exist.*name a folder"),
        ("config.json", "is a model and no engine folder.*kvlathe build --model"),
        ("notes.txt", "is not an engine folder.*manifest.json"),
    ],
)
def test_folders_that_are_no_engines_are_told_apart(
    holds: str | None, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "named"
    if holds:
        folder.mkdir()
        (folder / holds).write_text("{}")
    with pytest.raises(KvlatheError, match=f"(?is){said}"):
        manifests.verify(folder)


def test_a_file_that_may_not_be_read_is_not_called_malformed(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building the engine again would not help."""

    def refused(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(manifests, "pieces_digest", refused)
    with pytest.raises(KvlatheError) as error:
        manifests.verify(engine)
    assert error.value.reason == "permission denied"
    assert error.value.remedy == "let this process read it"
