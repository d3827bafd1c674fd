"""A call that the library cannot do is refused with a sentence, before anything is
written."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvlathe.base import native_build
from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.runtime.native import library as natives
from kvlathe.runtime.native.cpu import PageWriter
from kvlathe.runtime.native.library import Native
from tests.native_cpu.library import Call, Op, Refused, aligned
from tests.support.attend_cases import Case, plan_of


def small_case() -> Case:
    plan = plan_of([Lane(0, 0, 32, 32, 16)], [Group((0,), Tier(32, 32))], 32, 2)
    return Case(plan, 0, [2, 1], [[20], [3]], seed=0)


def other_abi(call: Call) -> None:
    call.args.abi_version = 99


def small_pool(call: Call) -> None:
    call.args.pool_bytes = CacheLayout(call.case.plan).page_stride[0]


def narrow_table(call: Call) -> None:
    call.arrays["page_table_widths"][0] = 1


def foreign_page(call: Call) -> None:
    call.tables[0][0, 0] = 1 << 20


def negative_page(call: Call) -> None:
    call.tables[0][0, 0] = -1


def crooked_pool(call: Call) -> None:
    call.memory = aligned(call.memory, offset=4)
    call.args.pool = call.memory.ctypes.data


def falling_starts(call: Call) -> None:
    call.arrays["cu_seqlens_q"][1] = 9


def negative_length(call: Call) -> None:
    call.arrays["lengths"][0, 0] = -5


def no_queries(call: Call) -> None:
    call.args.q = None


def no_angles(call: Call) -> None:
    call.args.cos = None


def unknown_isa(call: Call) -> None:
    call.args.isa = 77


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_abi, "ABI 99"),
        (small_pool, "outside the pool"),
        (narrow_table, "page table has 1"),
        (foreign_page, "outside the pool"),
        (negative_page, "outside the pool"),
        (crooked_pool, "not aligned"),
        (falling_starts, "cu_seqlens_q"),
        (negative_length, "negative"),
        (no_queries, "null"),
        (no_angles, "RoPE"),
        (unknown_isa, "not available"),
    ],
)
def test_a_bad_call_is_refused_before_anything_is_written(
    native: Native, spoil: Callable[[Call], None], message: str
) -> None:
    call = Call(small_case())
    spoil(call)
    memory = call.memory.copy()
    with pytest.raises(Refused, match=message):
        call.run(native)
    np.testing.assert_array_equal(call.memory, memory)
    assert np.isnan(call.o).all() and np.isnan(call.rows).all()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 7, "version 7.*build the library again"),
        (0, 1, "version 1.*build the engine again"),
        (2, 17, "page_tokens"),
        (3, 0, "damaged"),
        (18, 40, "rank"),
    ],
)
def test_a_damaged_layer_table_is_refused(
    native: Native, place: int, value: int, message: str
) -> None:
    table = layer_table(CacheLayout(small_case().plan), 0)
    table[place] = value
    with pytest.raises(Refused, match=message):
        Op(native, table)


@pytest.mark.parametrize(
    ("length", "message"), [(5, "short"), (20, "short"), (-1, "past the table")]
)
def test_a_shortened_layer_table_is_refused(
    native: Native, length: int, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        Op(native, layer_table(CacheLayout(small_case().plan), 0)[:length])


def test_a_page_at_a_crooked_address_is_not_sealed(native: Native) -> None:
    plan = plan_of(
        [Lane(0, 0, 32, 32, 16)],
        [Group((0,), Tier(32, 32), (Tier(8, 8),), SEAL)],
        32,
        2,
    )
    strides = CacheLayout(plan).page_stride
    source, target = (
        aligned(np.zeros(strides[0], np.uint8), offset=4),
        aligned(np.zeros(strides[1], np.uint8)),
    )
    with pytest.raises(KvlatheError, match="not aligned"):
        PageWriter(native, plan).seal(0, 1, [(source, target, [0])])


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libkvlathe.so").write_bytes(b"nothing")
    with pytest.raises(KvlatheError, match="cannot be loaded"):
        Native.load(tmp_path / "libkvlathe.so")


def test_another_abi_version_is_refused(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(natives, "ABI_VERSION", natives.ABI_VERSION + 1)
    with pytest.raises(KvlatheError, match="kvlathe speaks"):
        Native.load(native.path)


def test_the_switch_and_a_missing_library_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value, reason in (
        ("KVLATHE_NATIVE", "0", "KVLATHE_NATIVE=0"),
        ("KVLATHE_LIBRARY", str(tmp_path / "x"), "no lib"),
    ):
        with monkeypatch.context() as patch:
            patch.delenv("KVLATHE_LIBRARY", raising=False)
            patch.setenv(name, value)
            natives.find.cache_clear()
            found = natives.find()
            assert found.native is None and reason in found.reason
    natives.find.cache_clear()


def test_an_instruction_set_that_is_not_there_is_refused(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loudly: whoever asks for one does not want the function of the model instead."""
    monkeypatch.setenv("KVLATHE_LIBRARY", str(native.path))
    monkeypatch.setenv("KVLATHE_ISA", "portable")
    assert Native.load(native.path).isa == "portable"
    monkeypatch.setenv("KVLATHE_ISA", "sse2")
    natives.find.cache_clear()
    with pytest.raises(KvlatheError, match=r"KVLATHE_ISA is sse2"):
        natives.find()
    with pytest.raises(Refused, match="must be portable"):
        Call(small_case()).run(native)


def configured(folder: Path, **environment: str) -> str:
    """The output of CMake in ``folder``, which remembers what it found before."""
    if not shutil.which("cmake"):
        pytest.skip("no CMake")
    command = [
        "cmake",
        "-S",
        str(native_build.SOURCES),
        "-B",
        str(folder),
        "-DKVLATHE_CUDA=OFF",
    ]
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return " ".join((done.stdout + done.stderr).split())


def test_missing_tensorrt_headers_are_said_with_how_to_get_them(tmp_path: Path) -> None:
    said = configured(tmp_path, TENSORRT_INCLUDE_DIR="")
    assert (
        "SKIPPING the TensorRT plugin" in said
        and "git clone --depth 1 https://github.com/NVIDIA/TensorRT" in said
    )


def test_headers_that_are_named_later_are_taken(tmp_path: Path) -> None:
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "NvInfer.h").touch()
    assert "TENSORRT_INCLUDE_DIR is ''" in configured(
        tmp_path / "build", TENSORRT_INCLUDE_DIR=""
    )
    said = configured(tmp_path / "build", TENSORRT_INCLUDE_DIR=str(headers))
    assert (
        f"with the headers in {headers}" in said
        or f"TENSORRT_INCLUDE_DIR is '{headers}'" in said
    )
    later = configured(tmp_path / "build", TENSORRT_INCLUDE_DIR="")
    assert f"{headers}" in later, "and kept"


@pytest.mark.nightly
def test_cuda_kernels_that_cannot_be_built_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a compiler that is installed later is found in the same folder."""
    if not shutil.which("cmake"):
        pytest.skip("no CMake")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in (
        "cmake",
        "c++",
        "g++",
        "make",
        "ninja",
        "as",
        "ld",
        "ar",
        "ranlib",
        "sh",
        "uname",
    ):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    whole = os.environ["PATH"]
    for name in ("CUDACXX", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tools))
    folder = tmp_path / "build"
    with pytest.raises(KvlatheError, match="CMake finds no nvcc"):
        native_build.build(folder, cuda=True)
    assert not (folder / native_build.LIBRARY).exists()
    monkeypatch.setenv("PATH", whole)
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed: that it would be found later is not shown")
    command = [
        "cmake",
        "-S",
        str(native_build.SOURCES),
        "-B",
        str(folder),
        "-DKVLATHE_CUDA=ON",
    ]
    subprocess.run(
        [*command, "-DKVLATHE_CUDA_ARCHITECTURES=90a"], capture_output=True, check=True
    )
    assert not native_build._lacks_nvcc(folder)


def test_the_gpus_asked_for_are_those_compiled_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a later build that asks for none is for all again: CMake remembers."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(native_build, "obstacle", lambda: "")
    monkeypatch.setenv("KVLATHE_CUDA_ARCHITECTURES", "87")
    native_build.build(tmp_path, cuda=True, architectures="90a")
    native_build.build(tmp_path, cuda=True)
    monkeypatch.delenv("KVLATHE_CUDA_ARCHITECTURES")
    native_build.build(tmp_path)
    assert (
        "-DKVLATHE_CUDA_ARCHITECTURES=90a" in commands[0]
        and "-DKVLATHE_CUDA=ON" in commands[0]
    )
    assert "-DKVLATHE_CUDA_ARCHITECTURES=87" in commands[2]
    assert (
        "-UKVLATHE_CUDA_ARCHITECTURES" in commands[4]
        and "-DKVLATHE_CUDA=OFF" in commands[4]
    )
