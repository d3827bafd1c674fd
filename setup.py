"""Adds the native library to wheels built where CMake and a C++ compiler are. All else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from kvlathe.runtime import native_build


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout builds its own: kvlathe native
            native_build.build_into(Path(self.build_lib) / "kvlathe")


class MaybeBinary(Distribution):
    def has_ext_modules(self) -> bool:
        return not native_build.obstacle()


setup(cmdclass={"build_py": BuildWithLibrary}, distclass=MaybeBinary)
