"""Packages that pip makes of a checkout: an sdist and wheels that hold what they need,
and one sentence where they cannot be made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvlathe

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("models", "build", "out", ".*", "__pycache__", "*.egg-info")
NEEDED = {
    "kvlathe/export/report/report.html.j2",
    "kvlathe/export/report/report.css",
    "kvlathe/server/chat.css",
    "kvlathe/server/chat.html.j2",
    "kvlathe/server/chat.js",
    "kvlathe/server/markdown.js",
    "kvlathe/engines/build.py",
    "kvlathe/runtime/llm.py",
    "kvlathe/py.typed",
}
HOOK = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this one, which building may write to."""
    folder = tmp_path_factory.mktemp("packaging") / "checkout"
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored))


def make(kind: str, checkout: Path, compiler: bool = False) -> Path:
    """The file that the build backend makes: ``build_sdist`` or ``build_wheel``."""
    out = checkout.parent / f"{kind}-{checkout.name}"
    environment = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
    if not compiler:
        environment["PATH"] = str(Path(sys.executable).parent / "nothing")
    out.mkdir()
    command = [sys.executable, "-c", HOOK, kind, str(out)]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    """Unpacked."""
    with tarfile.open(make("build_sdist", checkout)) as archive:
        archive.extractall(checkout.parent, filter="data")
    return checkout.parent / f"kvlathe-{kvlathe.__version__}"


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_an_sdist_carries_all_that_a_wheel_is_made_of(sdist: Path) -> None:
    assert all((sdist / name).is_file() for name in NEEDED)
    native = {p.relative_to(ROOT) for p in (ROOT / "plugins_cpp").rglob("*.cc")}
    assert native and all((sdist / name).is_file() for name in native)
    assert (sdist / "data" / "eval_text.jsonl").is_file()
    assert not (sdist / "kvlathe" / "export").is_symlink()


@pytest.mark.slow
def test_a_wheel_without_a_library_is_for_any_platform(sdist: Path) -> None:
    """No compiler is there. The wheel still has the sources of the kernels, and the texts
    that commands read where nobody gives one."""
    wheel = make("build_wheel", sdist)
    assert wheel.name == f"kvlathe-{kvlathe.__version__}-py3-none-any.whl"
    held = files_of(wheel)
    assert held >= NEEDED and "kvlathe/plugins_cpp/CMakeLists.txt" in held
    texts = {f"kvlathe/data/{path.name}" for path in (ROOT / "data").glob("*.jsonl")}
    assert texts and texts <= held
    assert not [name for name in held if name.endswith(".so")]


def test_an_editable_install_is_a_path(sdist: Path) -> None:
    """Beside a clone, Python finds the clone's folder as a package without code. What a
    path holds wins over that; what only a finder knows does not."""
    with zipfile.ZipFile(make("build_editable", sdist)) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert archive.read(path).decode().strip() == str(sdist)
        assert not [name for name in archive.namelist() if name.endswith(".py")]


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("cmake"), reason="CMake is not installed")
def test_a_wheel_from_the_sdist_has_kernels_that_work(sdist: Path) -> None:
    copy = Path(shutil.copytree(sdist, sdist.parent / "with-compiler"))
    wheel = make("build_wheel", copy, compiler=True)
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none") and platform.startswith("linux")
    site = copy.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name, said in (("check", ["--check"]), ("build", [])):
        (site / "kvlathe" / "libkvlathe.so").unlink() if name == "build" else None
        done = subprocess.run(
            [sys.executable, "-m", "kvlathe", "native", *said, "--json"],
            cwd=copy.parent,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and '"in_use": "yes"' in done.stdout, done.stderr


def test_a_checkout_without_links_is_one_sentence(tmp_path: Path) -> None:
    """Files as git writes them in place of a link where it was told
    core.symlinks=false."""
    (tmp_path / "kvlathe").mkdir()
    for name in ("export", "engines", "runtime"):
        (tmp_path / "kvlathe" / name).write_text(f"../{name}")
    shutil.copy(ROOT / "setup.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "core.symlinks=false" in done.stderr and "Traceback" not in done.stderr
