"""Engines that were damaged, or forged by somebody who signs as we do: each is refused
in words, in little memory, or is the engine that it says it is."""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.plan import manifest as manifests
from kvlathe.plan.engine_folder import open_engine
from tests.support.runtime_cases import MODEL, manifest_of, model_shape, plans

MOST_KIB = 2 << 20
"""The most memory above what the process has, as the system counts: 2 GiB."""
VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    "",
    "x" * 10_000,
    "../plan.json",
    "/etc/passwd",
    "\ud800",
    [],
    [[]],
    {},
    {"a": {"b": []}},
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of an engine that is read before its graph is."""
    folder = tmp_path_factory.mktemp("whole") / "engine"
    folder.mkdir()
    plan = plans(model_shape())["sealed"]
    (folder / manifests.PLAN_FILE).write_text(plan.to_json())
    (folder / manifests.ONNX_FILE).write_bytes(bytes(1000))
    (folder / manifests.WEIGHTS_FILE).write_bytes(bytes(5000))
    shutil.copy(MODEL / "tokenizer.json", folder)
    manifests.write(folder, manifest_of(plan))
    open_engine(folder)
    return folder


def leaves(node: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401  (JSON)
    """(container, key) of everything in a JSON value."""
    if not isinstance(node, dict | list):
        return
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        yield from leaves(node[key])


def forge(folder: Path, rng: random.Random) -> None:
    """Change, remove or add one thing in the manifest, and sign it again."""
    path = folder / manifests.MANIFEST_FILE
    raw = json.loads(path.read_text())
    container, key = rng.choice(list(leaves(raw)))
    act = rng.choice(("set", "set", "set", "remove", "add"))
    if act == "set":
        container[key] = rng.choice(VALUES)
    elif act == "remove":
        del container[key]
    elif isinstance(container, dict):
        container[rng.choice(("more", "../x", "/x", "a\0b"))] = container[key]
    if isinstance(raw, dict):
        raw["digest"] = manifests.signature(raw)
    path.write_text(json.dumps(raw))


def damage(folder: Path, rng: random.Random) -> None:
    """Spoil one file, the manifest among them."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    act = rng.choice(("flip", "cut", "append", "gone", "folder", "link", "empty"))
    if act in ("gone", "folder", "link"):
        path.unlink()
    if act == "folder":
        path.mkdir()
    elif act == "link":
        path.symlink_to(rng.choice(("/etc/hostname", "/dev/zero", path.name)))
    elif act == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif act == "cut":
        path.write_bytes(data[: rng.randrange(len(data.rstrip()))])
    elif act == "append":
        path.write_bytes(data + b"{" * rng.randrange(1, 100_000))
    elif act == "empty":
        path.write_bytes(b"")


def refusals(
    whole: Path,
    scratch: Path,
    change: Callable[[Path, random.Random], None],
    count: int,
) -> int:
    """The number of ``count`` changed engines that are refused in words. Anything but a
    KvlatheError passes through and fails the test."""
    refused, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(count):
        folder = Path(shutil.copytree(whole, scratch / str(seed)))
        change(folder, random.Random(seed))
        try:
            open_engine(folder)
        except KvlatheError:
            refused += 1
        shutil.rmtree(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + MOST_KIB
    return refused


@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_forged_manifests_are_refused_in_words(
    whole: Path, tmp_path: Path, count: int
) -> None:
    """A few changes leave an engine: another name, command or set of versions."""
    assert refusals(whole, tmp_path, forge, count) > count // 2


@pytest.mark.parametrize(
    "count", [60, pytest.param(1000, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_damaged_files_are_refused_in_words(
    whole: Path, tmp_path: Path, count: int
) -> None:
    """Blanks at the end of the manifest aside, no damage leaves an engine."""
    assert refusals(whole, tmp_path, damage, count) == count
