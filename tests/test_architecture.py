"""The house rules that no linter knows, read from the source: who may import whom, and
what no file may say."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvlathe.plan.lives import LIVES

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("export", "engines", "runtime")
"""Top-level folders; kvlathe/export and its like are links to them."""

MAY_SEE: dict[str, set[str]] = {
    "base": set(),
    "plan": {"base"},
    "tasks": {"base"},
    "layers": {"base"},
    "export": {"base", "plan", "tasks", "layers"},
    "measuring": {"base", "plan", "tasks", "layers", "export", "runtime"},
    "engines": {"base", "plan", "tasks", "export", "measuring"},
    "runtime": {"base", "plan", "layers"},
    "evaluation": {"base", "plan", "tasks", "runtime"},
    "server": {"base", "plan", "engines", "runtime"},
    "bench": {"base", "plan", "engines", "runtime"},
    "triton": {"base", "plan", "engines", "runtime"},
    "dynamo": {"base", "plan", "engines", "runtime"},
    "frontier": {"base", "plan", "export", "engines", "runtime", "evaluation"},
    "integrations": {"base", "plan", "runtime"},
}
"""The rooms that each room may import. kvlathe/cli and what lies beside it may import
all."""

INSIDE: dict[str, dict[str, set[str]]] = {
    "export": {
        "families": set(),
        "gguf": set(),
        "model": {"families", "attention", "gguf"},
        "attention": set(),
        "calibration": {"model"},
        "bases": {"calibration"},
        "folding": {"bases", "model"},
        "methods": {"bases", "calibration"},
        "search": {"attention", "calibration", "folding", "methods", "model"},
        "onnx": {"attention", "model"},
        "report": {"methods"},
    },
    "runtime": {
        "text": set(),
        "native": set(),
        "sessions": {"native", "text"},
        "cache": {"native", "sessions"},
        "scheduling": {"cache", "sessions", "text"},
        "drafting": {"cache", "scheduling", "sessions", "text"},
        "requests": {"cache", "scheduling", "sessions", "text"},
    },
}
"""The same for the rooms inside a room. Modules beside them may import all of them."""

TORCH_CUDA: dict[str, set[str]] = {
    "device": set(),
    "state_kernels": {"model"},
    "states": {"device", "state_kernels"},
    "inputs": {"device", "states"},
    "model": set(),
    "attention": {"device", "inputs", "model"},
    "sampling": {"model"},
    "page_sums": {"device", "sampling"},
    "session": {"device", "page_sums", "sampling"},
    "tokens": {"device", "inputs", "session"},
    "compute": {"attention", "device", "inputs", "model", "session", "tokens"},
    "shards": {"attention", "compute", "device", "model", "sampling", "session"},
}
"""The same for the rooms of runtime/sessions/torch_cuda, the third level, and for what
lies beside them."""

SCHEDULING: dict[str, set[str]] = {
    "prompt": set(),
    "sequence": {"prompt"},
    "packing": {"sequence"},
    "choosing": {"sequence"},
    "step": {"choosing", "packing", "sequence"},
    "admission": {"sequence"},
    "row_costs": {"admission"},
    "allowance": {"admission"},
    "parts": {"allowance", "row_costs", "sequence", "step"},
    "fair_queue": {"sequence"},
    "shared_prompts": {"sequence"},
    "scheduler": {
        *("admission", "fair_queue", "parts", "sequence", "shared_prompts"),
        "step",
    },
    "engine": {"choosing", "parts", "scheduler", "sequence", "step"},
}
"""The same for the modules of runtime/scheduling, and the parts of a step: a part knows
steps, and no step knows its parts."""

DEEPER: dict[tuple[str, ...], dict[str, set[str]]] = {
    ("runtime", "sessions", "torch_cuda"): TORCH_CUDA,
    ("runtime", "scheduling"): SCHEDULING,
}
"""Rooms that have a table of their own."""

CONDUCTORS = {
    "engines/order.py",
    "engines/job.py",
    "engines/planning.py",
    "engines/pricing.py",
    "engines/measuring.py",
    "engines/build.py",
}
"""The only modules of engines/ that conduct calibrate -> plan -> fold -> export."""

STDLIB_ONLY = tuple(
    f"kvlathe/{name}.py"
    for name in (
        "base/digests",
        "base/machine",
        "plan/heads",
        "plan/formats",
        "plan/moves",
        "plan/sight",
        "plan/formula",
        "plan/token_score",
        "plan/stages",
        "plan/life",
        "plan/lives",
        "plan/groups",
        "plan/plan_data",
        "plan/index",
        "plan/check",
        "plan/plan",
        "plan/json_fields",
        "plan/measurement",
        "plan/manifest",
        "plan/replacing",
        "plan/engine_folder",
    )
)
HEAVY = {
    "torch",
    "transformers",
    "safetensors",
    "onnx",
    "onnxscript",
    "scipy",
    "matplotlib",
}
"""What building an engine takes and running one must not."""
TORCH_RUNS = re.compile(
    r"runtime/sessions/torch_cuda/[\w/]+\.py|kvlathe/layers/\w+\.py|integrations/\S+"
)
"""But for the backend that is torch, whose modules (and what they share) are imported
when such an engine is loaded, and for what vLLM loads."""

ORDINARY_WORDS = {"auto", "none", "window", "fp8"}
"""Names of methods that other code needs for other things."""
NAMES = {
    path.stem
    for path in (ROOT / "export/methods").glob("*.py")
    if "\nMETHOD =" in path.read_text()
}
PAGE = re.compile(r"docs/\w+\.md")
"""A refusal may name the page that helps, whatever it is called."""
METHODS = re.compile(
    rf"(?<![a-z])({'|'.join(sorted((NAMES - ORDINARY_WORDS) | {'palu'}))})(?![a-z])",
    re.IGNORECASE,
)
"""Every method, by the files that have one, and one that a benchmark compares."""
SOMEONES_MACHINE = re.compile(
    r"(?<![\w.<>$}-])/(?:home|root|Users|wor[k])/\w|\.\./share[d]\b"
)


@cache
def sources() -> list[Path]:
    """Every Python file of the product, once."""
    files = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    own = [
        path
        for path in (ROOT / "kvlathe").rglob("*.py")
        if path.relative_to(ROOT).parts[1] not in PARTS
    ]
    hosts = (ROOT / "integrations").rglob("*.py")
    return sorted([*files, *own, *hosts, ROOT / "build_engine.py"])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """``imported`` of a file."""
    return tuple(imported(path))


def imported(path: Path) -> Iterator[str]:
    """Dotted modules that a file imports anywhere. What ``from package import name``
    names is a module where there is a file of that name."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            folder = ROOT / module.replace(".", "/")
            for alias in node.names:
                inner = folder / alias.name
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield f"{module}.{alias.name}" if is_module else module


def segments_of(name: str) -> list[str]:
    """Rooms of a file, outermost first: ``kvlathe/plan/plan.py`` is plan, plan."""
    parts = name.removesuffix(".py").split("/")
    return parts[1:] if parts[0] == "kvlathe" else parts


def may_import(name: str, module: str) -> bool:
    """Whether file ``name`` may import ``module``, a dotted name that begins with
    kvlathe."""
    mine, theirs = segments_of(name), module.split(".")[1:]
    if mine[0] not in MAY_SEE or not theirs:
        return True
    if theirs[0] != mine[0]:
        if mine[0] == "engines" and theirs[0] == "export":
            return name in CONDUCTORS
        return theirs[0] in MAY_SEE[mine[0]]
    for room, table in DEEPER.items():
        depth = len(room)
        if tuple(mine[:depth]) == tuple(theirs[:depth]) == room:
            return _may_see(table, mine[depth:], theirs[depth:])
    return _may_see(INSIDE.get(mine[0], {}), mine[1:], theirs[1:])


def _may_see(table: dict[str, set[str]], mine: list[str], theirs: list[str]) -> bool:
    """Whether a file at ``mine`` may import ``theirs``, both counted from a room whose
    inner rooms ``table`` lists. Modules that it does not name may import all."""
    if not mine or mine[0] not in table:
        return True
    return theirs[0] == mine[0] or theirs[0] in table[mine[0]]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_follow_the_table_of_rooms(path: Path) -> None:
    ours = {module for module in imports(path) if module.split(".")[0] == "kvlathe"}
    assert not [module for module in ours if not may_import(name_of(path), module)]


def test_the_tables_have_no_circle() -> None:
    for table in (MAY_SEE, *INSIDE.values(), *DEEPER.values()):
        graphlib.TopologicalSorter(table).prepare()


def test_the_contract_has_no_circle() -> None:
    """Among the modules of kvlathe/plan, imports for types alone included."""
    graph: dict[str, set[str]] = {}
    for path in (ROOT / "kvlathe" / "plan").glob("*.py"):
        names = {name for name in imports(path) if name.startswith("kvlathe.plan.")}
        graph[f"kvlathe.plan.{path.stem}"] = names
    graphlib.TopologicalSorter(graph).prepare()


def test_nobody_asks_of_which_kind_a_life_is() -> None:
    """A life answers for itself, so that a new one needs no other file."""
    kinds = {life.__name__ for life in LIVES.values()}
    places: list[str] = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
                if names & kinds:
                    places.append(f"{name_of(path)} line {node.lineno}")
    assert not places


def test_the_import_rule_can_refuse() -> None:
    assert may_import("runtime/llm.py", "kvlathe.plan.plan")
    assert not may_import("runtime/llm.py", "kvlathe.export.folding.fold")
    assert not may_import("export/onnx/model.py", "kvlathe.runtime.llm")
    assert not may_import("export/model/spec.py", "kvlathe.export.onnx.model")
    assert not may_import("engines/cache.py", "kvlathe.export.folding.fold")
    assert may_import("engines/build.py", "kvlathe.export.folding.fold")
    assert not may_import("kvlathe/plan/plan.py", "kvlathe.tasks.metrics")
    assert may_import("kvlathe/cli/main.py", "kvlathe.export.folding.fold")
    rooms = "kvlathe.runtime.sessions.torch_cuda"
    mass = "runtime/sessions/torch_cuda/attention/mass.py"
    assert may_import(mass, f"{rooms}.model.rows")
    assert not may_import(mass, f"{rooms}.shards.nccl")
    step = "runtime/scheduling/step.py"
    assert may_import(step, "kvlathe.runtime.scheduling.packing")
    assert not may_import(step, "kvlathe.runtime.scheduling.parts.ranking")
    attend = "runtime/sessions/torch_cuda/attention/attend.py"
    assert may_import(attend, f"{rooms}.model.rows")
    assert not may_import(attend, f"{rooms}.shards.nccl")
    assert METHODS.search("use_fdc") and not METHODS.search("fdcx")


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_are_absolute_and_by_the_installed_name(path: Path) -> None:
    relative = [
        n.lineno
        for n in ast.walk(tree_of(path))
        if isinstance(n, ast.ImportFrom) and n.level
    ]
    assert not relative
    assert not [module for module in imports(path) if module.split(".")[0] in PARTS]


@pytest.mark.parametrize("name", STDLIB_ONLY)
def test_doors_between_processes_need_the_standard_library_only(name: str) -> None:
    roots = {
        module.split(".")[0]
        for module in imports(ROOT / name)
        if module not in ("kvlathe.base.errors", "kvlathe.base.package")
        and f"{module.replace('.', '/')}.py" not in STDLIB_ONLY
    }
    assert roots <= sys.stdlib_module_names


BUILDING = ("export", "engines", "measuring")
"""Rooms that build engines."""


@pytest.mark.parametrize(
    "path",
    [p for p in sources() if segments_of(name_of(p))[0] not in BUILDING],
    ids=name_of,
)
def test_running_an_engine_needs_no_building_library(path: Path) -> None:
    allowed = {"torch"} if TORCH_RUNS.fullmatch(name_of(path)) else set()
    allowed |= {"matplotlib"} if name_of(path) == "kvlathe/bench/plot.py" else set()
    assert not (HEAVY - allowed) & {module.split(".")[0] for module in imports(path)}


def test_the_command_line_and_the_runtime_import_without_building_libraries() -> None:
    """The same by experiment: heavy imports are made to fail, then everything that runs
    an engine is imported."""
    modules = [
        "kvlathe.cli.main",
        "kvlathe.server.run",
        "kvlathe.runtime.llm",
        "kvlathe.evaluation.evaluate",
        "kvlathe.plan.manifest",
    ]
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({sorted(HEAVY)!r}))\n"
        f"[importlib.import_module(name) for name in {modules!r}]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def words(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every name and every string that is not a docstring."""
    tree = tree_of(path)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            if isinstance(text := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), text
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in prose
        ):
            yield node.lineno, node.value


MAY_NAME_METHODS = ("export/methods/", "kvlathe/cli")
"""The methods themselves, and the help texts."""


@pytest.mark.parametrize(
    "path",
    [p for p in sources() if not name_of(p).startswith(MAY_NAME_METHODS)],
    ids=name_of,
)
def test_no_method_is_named_outside_the_methods(path: Path) -> None:
    found = [(line, PAGE.sub("", text)) for line, text in words(path)]
    assert not [(line, text) for line, text in found if METHODS.search(text)]


def tracked_texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    kinds = {
        ".py",
        ".md",
        ".toml",
        ".txt",
        ".sh",
        ".yml",
        ".yaml",
        ".j2",
        ".cpp",
        ".h",
        ".cu",
        ".cuh",
        ".cmake",
        "",
    }
    paths = (ROOT / line for line in listed.stdout.splitlines())
    return [
        p for p in paths if p.is_file() and not p.is_symlink() and p.suffix in kinds
    ]


def test_nothing_names_a_path_of_somebodys_machine() -> None:
    found = [
        name_of(p)
        for p in tracked_texts()
        if SOMEONES_MACHINE.search(p.read_text(encoding="utf-8"))
    ]
    assert not found


def test_checkpoints_are_read_without_running_their_code() -> None:
    """``trust_remote_code`` is only ever the constant False."""
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert (
                    isinstance(node.value, ast.Constant) and node.value.value is False
                ), name_of(path)


MISSPELLED_FLAG = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*_[a-z_]+")
"""A flag with the underscores of a field."""


def test_flags_are_named_as_one_types_them() -> None:
    """In refusals and help alike: ``--tokens-per-block``."""
    places = [
        f"{name_of(path)} {line}: {text}"
        for path in sources()
        for line, text in words(path)
        if MISSPELLED_FLAG.search(text)
    ]
    kernels = (ROOT / "plugins_cpp" / "src").rglob("*.[ch]*")
    places += [
        name_of(path)
        for path in kernels
        if MISSPELLED_FLAG.search(path.read_text("utf-8"))
    ]
    assert not places
    assert MISSPELLED_FLAG.search("give --kv_bits 16")
    assert not MISSPELLED_FLAG.search("give --kv-bits 16; a--b_c; --config /x_y")
