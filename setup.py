"""Adds the native library, its sources and data/ to wheels, and names them after the
platform where they hold a library. All else is in pyproject.toml."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LINKS = ("export", "engines", "runtime")
"""Links of kvlathe/ in a checkout; ordinary folders in an sdist."""

if not all((ROOT / "kvlathe" / name).is_dir() for name in LINKS):
    sys.exit(
        "error: kvlathe/export, kvlathe/engines and kvlathe/runtime are no links here: "
        "git was told core.symlinks=false. Clone again with "
        "'git clone -c core.symlinks=true', or download the sdist."
    )

sys.path.insert(0, str(ROOT))
from kvlathe.base import native_build  # noqa: E402


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout builds its own: kvlathe native
            return
        package = Path(self.build_lib) / "kvlathe"
        sources = package / "plugins_cpp"  # for kvlathe native of the installed package
        shutil.copytree(native_build.SOURCES, sources, dirs_exist_ok=True)
        shutil.copytree(ROOT / "data", package / "data", dirs_exist_ok=True)
        native_build.build_into(package)


class MaybeBinary(Distribution):
    def has_ext_modules(self) -> bool:
        return not native_build.obstacle()


class AnyPython(bdist_wheel):
    """The library is called through ctypes: one wheel for every Python of a
    platform."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": AnyPython},
    distclass=MaybeBinary,
)
