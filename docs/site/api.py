"""A hook of mkdocs: one page of the API reference for every room of the source.

The pages exist only while the site is built. mkdocstrings fills them from the
docstrings, without importing anything.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "kvlathe/plan",
    "kvlathe/base",
    "kvlathe/tasks",
    "export",
    "engines",
    "runtime",
    "kvlathe/evaluation",
    "kvlathe/server",
    "kvlathe/bench",
    "kvlathe/frontier",
    "kvlathe/triton",
)
"""Bottom first, as in docs/architecture.md. mkdocs.yml lists their pages."""


def modules(room: str) -> list[str]:
    """The dotted names of a room's public modules that hold code."""
    paths = sorted((ROOT / room).rglob("*.py"))
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths]
    names = [part if part[0] == "kvlathe" else ("kvlathe", *part) for part in parts]
    return [".".join(name) for name in names if not name[-1].startswith("_")]


def page_of(room: str) -> str:
    """The page's address on the site."""
    return f"api/{room.split('/')[-1]}.md"


def reference(room: str) -> str:
    """The Markdown of a room's page."""
    entries = "\n\n".join(f"::: {name}" for name in modules(room))
    return f"# {room}\n\n{entries}\n"


def contents() -> str:
    """The Markdown of the page that lists the rooms."""
    rows = [f"| [{room}]({page_of(room).split('/')[-1]}) |" for room in ROOMS]
    table = "\n".join(["| room |", "|---|", *rows])
    return f"# Python API\n\nEvery public module, by room, from its docstrings.\n\n{table}\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages before mkdocs looks for them."""
    files.append(File.generated(config, "api/index.md", content=contents()))
    for room in ROOMS:
        files.append(File.generated(config, page_of(room), content=reference(room)))
    return files
