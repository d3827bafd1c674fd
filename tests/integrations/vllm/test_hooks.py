"""What the plugin imports and overrides of vLLM is in every release since 0.25: read
from the sources on PyPI, without installing one of them."""

from __future__ import annotations

import ast
import io
import json
import re
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[3]
PLUGIN = ROOT / "integrations/vllm/kvlathe_vllm"
INDEX = "https://pypi.org/simple/vllm/"
FIRST = (0, 25)
"""The oldest release that the plugin says it runs in (docs/vllm.md)."""
ENDLESS = (1000, 0)
SOURCE = re.compile(r"vllm-(\d+)\.(\d+)\.(\d+)\.tar\.gz")
SINCE = {"KVCacheLayout": (0, 29), "supported_kv_cache_layouts": (0, 29)}
"""Name -> the release from which vLLM has it: older ones never ask for it."""
UNTIL = {"get_kv_cache_shape": (0, 29)}
"""Name -> the release from which vLLM has it no more."""
Version = tuple[int, int]


class Hook(NamedTuple):
    """A name that a module of vLLM must have."""

    module: str
    name: str


class Override(NamedTuple):
    """A method of the plugin that vLLM calls in place of its base's, and the names of
    what it takes; ``anything``: it takes others, too."""

    base: Hook
    method: str
    takes: tuple[str, ...]
    anything: bool


def hooks_of(tree: ast.Module) -> dict[str, Hook]:
    """Local name -> what of vLLM it is."""
    found: dict[str, Hook] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            for alias in node.names:
                found[alias.name] = Hook(node.module or "", alias.name)
    return found


def overrides_of(tree: ast.Module, hooks: dict[str, Hook]) -> Iterator[Override]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            hook = hooks.get(name.id) if isinstance(name, ast.Name) else None
            for method in node.body if hook else ():
                if hook and isinstance(method, ast.FunctionDef):
                    yield Override(hook, method.name, *taken(method))


def taken(method: ast.FunctionDef) -> tuple[tuple[str, ...], bool]:
    a = method.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return tuple(names), a.kwarg is not None


class Release:
    """The sources of a release."""

    def __init__(self, archive: bytes) -> None:
        self.files: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                path = member.name.partition("/")[2]
                if path.startswith("vllm/") and path.endswith(".py"):
                    read = tar.extractfile(member)
                    self.files[path] = read.read() if read else b""

    def module(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        source = self.files.get(f"{path}.py", self.files.get(f"{path}/__init__.py"))
        return None if source is None else ast.parse(source)

    def has(self, hook: Hook) -> bool:
        tree = self.module(hook.module)
        if tree is None:
            return False
        shared = [Hook(name, hook.name) for name in stars_of(tree, hook.module)]
        return hook.name in set(names_of(tree)) or any(map(self.has, shared))

    def method(self, override: Override) -> ast.FunctionDef | None:
        tree = self.module(override.base.module) or ast.Module([], [])
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == override.base.name:
                for method in node.body:
                    named = isinstance(method, ast.FunctionDef)
                    if named and method.name == override.method:
                        return method
        return None


def names_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def stars_of(tree: ast.Module, module: str) -> Iterator[str]:
    """Modules whose names all are those of package ``module``, too."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield f"{module}.{node.module}" if node.level else str(node.module)


def moved(version: Version, release: Release) -> Iterator[str]:
    """A line for each hook that the release has not, or asks otherwise."""
    for path in sorted(PLUGIN.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        hooks = hooks_of(tree)
        for hook in hooks.values():
            if version >= SINCE.get(hook.name, FIRST) and not release.has(hook):
                yield f"{path.name}: {hook.module} has no {hook.name}"
        for override in overrides_of(tree, hooks):
            method = release.method(override)
            if method is None:
                if is_asked(override.method, version):
                    yield f"{path.name}: vLLM has no {override.method} to override"
                continue
            lacks = set(taken(method)[0]) - set(override.takes)
            if lacks and not override.anything:
                yield f"{path.name}: {override.method} is given {', '.join(lacks)}"


def is_asked(method: str, version: Version) -> bool:
    """Whether a release should have a method that the plugin overrides. What begins with
    one underscore is the plugin's own."""
    own = method.startswith("_") and not method.startswith("__")
    now = version >= SINCE.get(method, FIRST) and version < UNTIL.get(method, ENDLESS)
    return now and not own


def fetched(url: str, accept: str = "*/*") -> bytes:
    asked = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return answer.read()


def releases() -> dict[str, str]:
    """Version -> the address of its sources, of all since FIRST."""
    try:
        page = json.loads(fetched(INDEX, "application/vnd.pypi.simple.v1+json"))
    except OSError as error:
        pytest.skip(f"PyPI cannot be asked: {error}")
    found: dict[str, str] = {}
    for file in page["files"]:
        named = SOURCE.fullmatch(file["filename"])
        if named and (int(named[1]), int(named[2])) >= FIRST:
            found[".".join(named.groups())] = file["url"]
    return found


def test_every_release_of_vllm_has_what_the_plugin_hooks_into() -> None:
    lost: list[str] = []
    known = releases()
    assert known, "PyPI names no sources"
    for name, url in known.items():
        major, minor, _ = name.split(".")
        release = Release(fetched(url))
        version = int(major), int(minor)
        lost += [f"vLLM {name}: {line}" for line in moved(version, release)]
    assert not lost, "\n".join(lost)
