"""The house rules that no linter knows, read from the source: who may import whom, and what no file may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("export", "engines", "runtime")
BASE = ("activations", "errors", "console", "haystack", "metrics", "tasks", "tensorrt_library", "tokenizer_files")
"""Modules of kvlathe/ below every part: any part may import them, they import no part."""

DOORS = {"export": {"plan", "layout"}, "engines": {"manifest"}, "runtime": {"session"}}
"""What another part may import of a part. Parts look down only: runtime -> engines -> export."""

BELOW = {"export": (), "engines": ("export",), "runtime": ("export", "engines")}
CONDUCTORS = {"engines/build.py", "engines/planning.py"}
"""They conduct calibrate -> plan -> fold -> export, so they may reach through the doors of the parts below them."""

STDLIB_ONLY = ("export/plan.py", "engines/manifest.py")
HEAVY = {"torch", "transformers", "safetensors", "onnx", "onnxscript", "scipy", "matplotlib"}
"""What building an engine takes and running one must not."""
TORCH_RUNS = re.compile(r"runtime/cuda_\w+\.py|kvlathe/activations\.py")
"""But for the backend that is torch, whose modules (and what they share) are imported when such an engine is loaded."""

METHODS = re.compile(
    r"(?<![a-z])(fdc|zack|hack|zipcache|uncomp|palu|kivi|kvquant|h2o|snapkv|keyformer)(?![a-z])", re.IGNORECASE
)
SOMEONES_MACHINE = re.compile(r"(?<![\w.<>$}-])/(?:home|root|Users|wor[k])/\w|\.\./share[d]\b")


def sources() -> list[Path]:
    """Every Python file of the product, once (kvlathe/export and its like are links to the top-level folders)."""
    files = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    own = ("*.py", "server/*.py")
    return sorted([*files, *(path for kind in own for path in (ROOT / "kvlathe").glob(kind)), ROOT / "build_engine.py"])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """Dotted modules that a file imports anywhere; ``from kvlathe.export import plan`` is kvlathe.export.plan."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module in {"kvlathe", *(f"kvlathe.{part}" for part in PARTS)}:
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def part_of(name: str) -> str:
    """export, engines or runtime for a file of one; base or top for a file of kvlathe/ itself and build_engine.py."""
    first, _, rest = name.partition("/")
    if first in PARTS:
        return first
    return "base" if rest.removesuffix(".py") in BASE else "top"


def may_import(name: str, module: str) -> bool:
    """Whether file ``name`` may import ``module``, a dotted name that begins with kvlathe."""
    mine = part_of(name)
    segments = module.split(".")[1:]
    if mine == "top" or not segments:
        return True
    target = segments[0]
    if target not in PARTS:
        return target in BASE or target == "__version__"
    if target == mine:
        return True
    if mine == "base" or target not in BELOW[mine]:
        return False
    return name in CONDUCTORS or segments[1:2] == [] or segments[1] in DOORS[target]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_look_down_and_through_the_doors(path: Path) -> None:
    ours = {module for module in imports(path) if module.split(".")[0] == "kvlathe"}
    assert not [module for module in ours if not may_import(name_of(path), module)]


def test_the_import_rule_can_refuse() -> None:
    assert may_import("runtime/x.py", "kvlathe.export.plan") and not may_import("runtime/x.py", "kvlathe.export.fold")
    assert not may_import("export/x.py", "kvlathe.engines.manifest") and not may_import("export/x.py", "kvlathe.cli")
    assert not may_import("kvlathe/metrics.py", "kvlathe.export.plan") and may_import(
        "kvlathe/cli.py", "kvlathe.export.fold"
    )
    assert METHODS.search("use_fdc") and not METHODS.search("fdcx")


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_are_absolute_and_by_the_installed_name(path: Path) -> None:
    relative = [n.lineno for n in ast.walk(tree_of(path)) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relative
    assert not [module for module in imports(path) if module.split(".")[0] in PARTS]


@pytest.mark.parametrize("name", STDLIB_ONLY)
def test_doors_between_processes_need_the_standard_library_only(name: str) -> None:
    roots = {
        module.split(".")[0]
        for module in imports(ROOT / name)
        if module not in ("kvlathe.errors", "kvlathe.__version__")
    }
    assert roots <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "path", [p for p in sources() if part_of(name_of(p)) not in ("export", "engines")], ids=name_of
)
def test_running_an_engine_needs_no_building_library(path: Path) -> None:
    allowed = {"torch"} if TORCH_RUNS.fullmatch(name_of(path)) else set()
    assert not (HEAVY - allowed) & {module.split(".")[0] for module in imports(path)}


def test_the_command_line_and_the_runtime_import_without_building_libraries() -> None:
    """The same by experiment: heavy imports are made to fail, then everything that runs an engine is imported."""
    modules = [
        "kvlathe.cli",
        "kvlathe.server.run",
        "kvlathe.runtime.llm",
        "kvlathe.runtime.evaluate",
        "kvlathe.engines.manifest",
    ]
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({sorted(HEAVY)!r}))\n"
        f"[importlib.import_module(name) for name in {modules!r}]"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def words(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every name and every string that is not a docstring."""
    tree = tree_of(path)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            if isinstance(text := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), text
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


MAY_NAME_METHODS = ("export/methods/", "kvlathe/cli")
"""The methods themselves, and the help texts."""


@pytest.mark.parametrize("path", [p for p in sources() if not name_of(p).startswith(MAY_NAME_METHODS)], ids=name_of)
def test_no_method_is_named_outside_the_methods(path: Path) -> None:
    assert not [(line, text) for line, text in words(path) if METHODS.search(text)]


def tracked_texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    kinds = {".py", ".md", ".toml", ".txt", ".sh", ".yml", ".yaml", ".j2", ".cpp", ".h", ".cu", ".cuh", ".cmake", ""}
    paths = (ROOT / line for line in listed.stdout.splitlines())
    return [p for p in paths if p.is_file() and not p.is_symlink() and p.suffix in kinds]


def test_nothing_names_a_path_of_somebodys_machine() -> None:
    found = [name_of(p) for p in tracked_texts() if SOMEONES_MACHINE.search(p.read_text(encoding="utf-8"))]
    assert not found


def test_checkpoints_are_read_without_running_their_code() -> None:
    """``trust_remote_code`` is only ever the constant False."""
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, name_of(path)
