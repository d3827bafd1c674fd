"""Checkpoints by name, from a hub on this machine: what is fetched, and what is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlathe.base import hub as hubs
from kvlathe.base.errors import KvlatheError
from kvlathe.base.hub import checkpoint_folder, missing_files, model_name
from tests.support.fake_hub import COMMIT, FakeHub, serving_hub
from tests.support.runtime_cases import MODEL

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
NAME = "someone/lathe-5m"


def files() -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}
    return found | {
        "pytorch_model.bin": b"pickle",
        "modeling_custom.py": b"raise SystemExit",
        "consolidated.safetensors": b"again",
        "onnx/model.safetensors": b"elsewhere",
        "README.md": b"# read me",
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving_hub(FakeHub(NAME, files())) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield found


def names(folder: Path) -> set[str]:
    found = folder.rglob("*")
    return {path.relative_to(folder).as_posix() for path in found if path.is_file()}


def test_only_weights_tokenizer_and_configs_are_fetched(hub: FakeHub) -> None:
    folder = checkpoint_folder(Path(NAME))
    allowed = {path.name for path in MODEL.iterdir() if path.is_file()}
    assert names(folder) <= allowed and model_name(folder) == "lathe-5m"
    assert (folder / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()
    assert not missing_files(folder)
    assert not any(path.suffix in (".py", ".bin") for path in folder.rglob("*"))
    count = len(hub.asked)
    assert checkpoint_folder(Path(NAME), COMMIT) == folder and len(hub.asked) == count


def test_a_folder_goes_before_a_name(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert checkpoint_folder(Path(NAME)) == Path(NAME) and not hub.asked
    with pytest.raises(KvlatheError, match="a folder has no revisions"):
        checkpoint_folder(Path(NAME), "main")


def test_words_that_are_no_hub_name_are_folders(hub: FakeHub) -> None:
    names = ("nothing", "../other/thing", "/tmp/no/such", "a/b/c")
    for path in (
        *names,
        "org/..",
        "org/.",
        "org/a--b",
        "org/a..b",
        "org/a b",
        "org/a-",
    ):
        assert checkpoint_folder(Path(path)) == Path(path)
    assert not hub.asked


def test_a_mistyped_folder_is_not_asked_of_the_hub(
    hub: FakeHub, tmp_path: Path
) -> None:
    for name in ("lathe-5m", "lathe-27m", "zebra"):
        (tmp_path / "models" / name).mkdir(parents=True)
    with pytest.raises(KvlatheError, match="but lathe-5m, lathe-27m") as refused:
        checkpoint_folder(Path("models/lathe-5n"))
    assert "zebra" not in str(refused.value) and not hub.asked
    with pytest.raises(KvlatheError, match="no such model"):
        checkpoint_folder(Path("models/lathe-5n"), "main")


def test_a_revision_is_asked_for(hub: FakeHub) -> None:
    assert checkpoint_folder(Path(NAME), "v1").name == COMMIT
    with pytest.raises(KvlatheError, match="no such revision"):
        checkpoint_folder(Path(NAME), "v2")


def test_a_name_that_the_hub_does_not_have_is_refused(hub: FakeHub) -> None:
    with pytest.raises(KvlatheError, match="no such model"):
        checkpoint_folder(Path("someone/other"))


def test_a_gated_model_takes_a_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    with pytest.raises(KvlatheError, match="HF_TOKEN") as refused:
        checkpoint_folder(Path(NAME))
    assert "hf_secret" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert not missing_files(checkpoint_folder(Path(NAME)))


def test_a_model_of_pickles_is_refused_and_none_is_fetched(hub: FakeHub) -> None:
    hub.files = {k: v for k, v in files().items() if not k.endswith(".safetensors")}
    with pytest.raises(KvlatheError, match="pickles are not read"):
        checkpoint_folder(Path(NAME))
    assert "pytorch_model.bin" not in {name for name, _ in hub.asked}


def test_a_broken_download_goes_on_where_it_broke_off(hub: FakeHub) -> None:
    # huggingface_hub writes pieces of 10 MB.
    hub.files["model.safetensors"] *= 2
    hub.breaks_at = 11 << 20
    try:
        folder = checkpoint_folder(Path(NAME))
    except KvlatheError as refused:
        assert "what was fetched is kept" in str(refused)
        folder = checkpoint_folder(Path(NAME))
    assert not missing_files(folder)
    weights = folder / "model.safetensors"
    assert weights.read_bytes() == hub.files[weights.name]
    starts = [start for name, start in hub.asked if name == weights.name]
    assert len(starts) > 1 and max(starts) > 0


def test_without_a_network_the_cache_answers_or_says_what_is_missing(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hubs.offline()
    with pytest.raises(KvlatheError, match="HF_HUB_OFFLINE is set"):
        checkpoint_folder(Path(NAME))
    assert not hub.asked
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = checkpoint_folder(Path(NAME))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    count = len(hub.asked)
    assert checkpoint_folder(Path(NAME)) == folder and len(hub.asked) == count


def test_shards_that_a_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / hubs.INDEX).write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-1.safetensors").touch()
    assert missing_files(tmp_path) == ["model-2.safetensors"]


def gguf_only(*names: str) -> dict[str, bytes]:
    return dict.fromkeys(names, b"GGUF") | {"README.md": b"# read me"}


def test_the_one_gguf_file_of_a_model_is_fetched(hub: FakeHub) -> None:
    hub.files = gguf_only("tiny-Q8_0.gguf", "mmproj-tiny.gguf", "sub/tiny.gguf")
    folder = checkpoint_folder(Path(NAME))
    assert names(folder) == {"tiny-Q8_0.gguf"}
    assert model_name(folder) == "tiny-Q8_0"
    assert checkpoint_folder(Path(NAME)) == folder


def test_of_several_gguf_files_one_is_asked_for(hub: FakeHub) -> None:
    hub.files = gguf_only("tiny-Q4_0.gguf", "tiny-Q8_0.gguf")
    with pytest.raises(KvlatheError, match=r"tiny-Q4_0\.gguf, tiny-Q8_0\.gguf"):
        checkpoint_folder(Path(NAME))
    assert not [path for path, _ in hub.asked if path.endswith(".gguf")]
    file = checkpoint_folder(Path(NAME) / "tiny-Q8_0.gguf")
    assert file.read_bytes() == b"GGUF" and names(file.parent) == {file.name}
    assert model_name(file) == "tiny-Q8_0"


def test_of_safetensors_and_a_gguf_file_the_first_are_fetched(hub: FakeHub) -> None:
    hub.files["tiny.gguf"] = b"GGUF"
    assert "tiny.gguf" not in names(checkpoint_folder(Path(NAME)))
