"""``kvlathe native``: build the native kernels, or say which are in use."""

from __future__ import annotations

import click

from kvlathe.cli_common import Result, reports, show_pairs
from kvlathe.errors import KvlatheError


@click.command("native")
@click.option("--check", is_flag=True, help="Build nothing: only say what is in use.")
@click.option("--cuda", is_flag=True, help="Build the CUDA kernels too; takes nvcc, and minutes an architecture.")
@click.option(
    "--cuda-architectures",
    default="",
    help="Compute capabilities as CMake names them: native (this GPU), 90a, 80;89. By default all from 7.5 to 12.1.",
)
@reports(show_pairs)
def native_command(check: bool, cuda: bool, cuda_architectures: str) -> Result:
    """Build the native kernels in this checkout (CMake and a C++ compiler), and show what will run."""
    from kvlathe import tensorrt_library
    from kvlathe.runtime import native, native_build

    if not check:
        native_build.build(cuda=cuda or bool(cuda_architectures), architectures=cuda_architectures)
    found = native.find()
    if found.native is None:
        if not check:
            raise KvlatheError("the native kernels were built and are not in use", found.reason)
        return {"in_use": "no", "reason": found.reason}
    kernels = "yes" if found.native.cuda else "no: it was built without --cuda"
    plugin = str(tensorrt_library.find_plugin() or f"no: {tensorrt_library.PLUGIN} is not built (docs/native.md)")
    library = {"library": str(found.native.path), "cpu": found.native.isa, "cuda": kernels}
    return {"in_use": "yes", **library, "tensorrt_plugin": plugin}


COMMANDS = (native_command,)
