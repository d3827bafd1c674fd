"""Every struct that Python hands to the library is laid out as its header says."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from kvlathe.runtime.native import (
    attend,
    coding,
    cpu,
    cuda,
    library,
    observing,
    parts,
    products,
)

INCLUDE = Path(__file__).resolve().parents[2] / "plugins_cpp" / "include"
HEADERS = ("abi", "cpu", "cache", "coding", "rows", "products")
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "kvlathe_status": library.Status,
    "kvlathe_part": parts.Part,
    "kvlathe_window": parts.WindowForm,
    "kvlathe_cpu_seal_page": cpu.SealPage,
    "kvlathe_cpu_seal_args": cpu.SealArgs,
    "kvlathe_move_args": cpu.MoveArgs,
    "kvlathe_parallel": attend.Parallel,
    "kvlathe_attend_args": attend.AttendArgs,
    "kvlathe_prompt_part": cuda.PromptPart,
    "kvlathe_prompts": cuda.Prompts,
    "kvlathe_attend_decode_args": cuda.AttendDecodeArgs,
    "kvlathe_spread_args": cuda.SpreadArgs,
    "kvlathe_append_args": cuda.AppendArgs,
    "kvlathe_cuda_seal_page": cuda.SealPage,
    "kvlathe_cuda_seal_args": cuda.SealArgs,
    "kvlathe_observe_part": observing.ObservePart,
    "kvlathe_observe_args": observing.ObserveArgs,
    "kvlathe_cuda_move_args": observing.CudaMoveArgs,
    "kvlathe_rows_args": cuda.RowsArgs,
    "kvlathe_product_args": products.ProductArgs,
    "kvlathe_coded_matrix": coding.CodedMatrix,
    "kvlathe_coded_part": coding.CodedPart,
    "kvlathe_coded_page": coding.CodedPage,
}


def fields_of(struct: type[ctypes.Structure]) -> list[str]:
    return [str(field[0]) for field in struct._fields_]


def c_program() -> str:
    """Prints the size of each struct, then the offset of each of its fields."""
    lines = ["#include <stdio.h>"]
    lines += [f'#include "kvlathe/{name}.h"' for name in HEADERS]
    lines.append("int main(void) {")
    for name, struct in STRUCTS.items():
        lines.append(f'printf("%zu ", sizeof({name}));')
        for field in fields_of(struct):
            lines.append(f'printf("%zu ", offsetof({name}, {field}));')
    return "\n".join([*lines, "return 0;", "}"])


def test_structs_are_those_of_the_headers(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, program = tmp_path / "sizes.c", tmp_path / "sizes"
    source.write_text(c_program(), "ascii")
    command = [compiler, "-include", "stddef.h", f"-I{INCLUDE}", source, "-o", program]
    subprocess.run(command, check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True)
    ours: list[int] = []
    for struct in STRUCTS.values():
        ours.append(ctypes.sizeof(struct))
        ours += [getattr(struct, field).offset for field in fields_of(struct)]
    assert [int(word) for word in printed.stdout.split()] == ours


def test_every_struct_of_the_headers_is_checked() -> None:
    text = "".join((INCLUDE / "kvlathe" / f"{n}.h").read_text() for n in HEADERS)
    names = {
        line.split()[1].rstrip(";")
        for line in text.splitlines()
        if line[:1] == "}" and "_" in line
    }
    assert names - {"kvlathe_token_field"} == set(STRUCTS)
