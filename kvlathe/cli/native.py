"""``kvlathe native``: build the native kernels, or say which are in use."""

from __future__ import annotations

import click

from kvlathe.base.errors import KvlatheError
from kvlathe.cli.common import Result, reports, show_pairs


@click.command("native")
@click.option("--check", is_flag=True, help="Build nothing: only say what is in use.")
@click.option(
    "--cuda",
    is_flag=True,
    help="Build the CUDA kernels too; takes nvcc, and minutes an architecture.",
)
@click.option(
    "--cuda-architectures",
    default="",
    help="Compute capabilities as CMake names them: native (this GPU), 90a, 80;89. By default all from 7.5 to 12.1.",
)
@reports(show_pairs)
def native_command(check: bool, cuda: bool, cuda_architectures: str) -> Result:
    """Build the native kernels (CMake and a C++ compiler), and show what will run."""
    from kvlathe.base import native_build, tensorrt_library
    from kvlathe.runtime.native import library as native

    if not check:
        native_build.build_here(
            cuda=cuda or bool(cuda_architectures), architectures=cuda_architectures
        )
    loaded = native.find()
    if loaded.native is None:
        if not check:
            raise KvlatheError(
                "the native kernels were built and are not in use", loaded.reason
            )
        return {"in_use": "no", "reason": loaded.reason}
    kernels = "yes" if loaded.native.cuda else "no: it was built without --cuda"
    plugin = str(
        tensorrt_library.find_plugin()
        or f"no: {tensorrt_library.PLUGIN} is not built (docs/native.md)"
    )
    library = {
        "library": str(loaded.native.path),
        "cpu": loaded.native.isa,
        "cuda": kernels,
    }
    return {"in_use": "yes", **library, "tensorrt_plugin": plugin}


COMMANDS = (native_command,)
