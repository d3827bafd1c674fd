"""All that a page names is there: every link, every anchor, every file of the
source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, ROOT, name_of, pages

FOLDERS = (
    ".ci",
    ".github",
    "data",
    "docker",
    "docs",
    "engines",
    "benchmarks",
    "examples",
    "export",
    "integrations",
    "kvlathe",
    "models",
    "plugins_cpp",
    "runtime",
    "scripts",
    "tests",
)
TARGET = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
SOURCE = re.compile(r"[\w./*{},-]*\w\.(?:py|cc|cu|cuh|h|sh|j2|jinja|toml|yml|yaml)\b")
COMMAND = re.compile(
    r"(?:python3?|bash|sh) ((?:tests|scripts|docker|examples)/[\w./-]+\w)"
)
MODULE = re.compile(r"python3? -m (benchmarks\.[a-z]\w*)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
OTHERS = {"NvInfer.h", "convert_checkpoint.py", "docker-compose.yml", "quantize.py"}
"""Files that pages name and other projects own."""


@cache
def files() -> frozenset[str]:
    """Every file of the repository, by its path from the root."""
    listed = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    listed += [path for path in ROOT.iterdir() if path.is_file()]
    return frozenset(path.relative_to(ROOT).as_posix() for path in listed)


@cache
def tails() -> frozenset[str]:
    """Every path of a file and its ends: a/b/c.py, b/c.py, c.py."""
    parts = [name.split("/") for name in files()]
    return frozenset("/".join(p[i:]) for p in parts for i in range(len(p)))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    kept = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.strip().replace(" ", "-") for title in kept}


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere. Links out of the repository are left
    out."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [one or other for one, other in TARGET.findall(text)]
    return [
        target
        for target in targets
        if "://" not in target and not target.startswith("mailto:")
        if not leads_somewhere(page, target)
    ]


def leads_somewhere(page: Path, target: str) -> bool:
    """Whether a relative link has a file, and the file the link's anchor."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return file.exists() and (not anchor or anchor in anchors(file))


def file_of(module: str) -> str:
    """The file that ``python -m MODULE`` runs: of a package, its __main__.py."""
    name = module.replace(".", "/")
    package = f"{name}/__main__.py"
    return package if package in tails() else f"{name}.py"


def missing_files(page: Path) -> list[str]:
    """Names of source files on a page that no file of the repository has.

    Outside of code blocks every such name counts, by its whole path or its end. In code
    blocks only the scripts and benchmarks that commands run count.
    """
    text = page.read_text(encoding="utf-8")
    names = set(COMMAND.findall(text))
    names |= {file_of(name) for name in MODULE.findall(text)}
    names |= {name for name in SOURCE.findall(FENCE.sub("", text)) if "*" not in name}
    names = {name.removeprefix("../").removeprefix("./") for name in names}
    return sorted(name for name in names - tails() - OTHERS if "{" not in name)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert not missing_files(page)


def test_the_link_test_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](gone.md), [b](#one), [c](#two), `export/gone.py`\n\n"
        "    python -m benchmarks.gone\n"
    )
    assert broken_links(page) == ["gone.md", "#two"]
    assert missing_files(page) == ["benchmarks/gone.py", "export/gone.py"]
