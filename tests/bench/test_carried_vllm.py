"""A packed library has its own architecture's code byte for byte, and zeros elsewhere."""

from __future__ import annotations

import struct
import tarfile
import zipfile
from pathlib import Path

from benchmarks import carried_vllm as carried

Entry = tuple[int, int, bytes]
OWN = (carried.MACHINE, carried.ARCHITECTURE)


def container(*entries: Entry) -> bytes:
    """A fat binary as nvcc writes it, entries with headers of 64 bytes."""
    made = b""
    for kind, architecture, code in entries:
        head = bytearray(64)
        carried.ENTRY.pack_into(head, 0, kind, 0x101, 64, len(code))
        struct.pack_into("<I", head, carried.ARCHITECTURE_AT, architecture)
        made += bytes(head) + code
    return carried.CONTAINER.pack(carried.MAGIC, 1, 16, len(made)) + made


def elf(fat: bytes) -> bytes:
    """A file with three sections: none, its names, and ``fat``."""
    names = b"\0.shstrtab\0.nv_fatbin\0"
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    at = 64 + len(names) + len(fat)
    struct.pack_into("<Q", head, carried.SECTIONS_AT, at)
    struct.pack_into("<HHH", head, carried.SECTION_SIZES_AT, 64, 3, 1)
    places = [(0, 0, 0), (1, 64, len(names)), (11, 64 + len(names), len(fat))]
    table = [
        carried.SECTION.pack(name, 0, 0, 0, start, size, 0, 0, 0, 0)
        for name, start, size in places
    ]
    return bytes(head) + names + fat + b"".join(table)


def test_code_of_other_architectures_becomes_zeros_and_nothing_else_moves() -> None:
    own, other, small = b"\1" * 80, b"\2" * 48, b"\3" * 24
    large = b"\4" * (carried.MOST_PTX + 8)
    padding = bytes(24)
    before = [
        container((2, 80, other), (*OWN, own), (1, 90, small), (2, 120, other)),
        container((2, 100, other)),
        container((1, 80, small), (2, 80, other), (1, 80, large)),
    ]
    after = [
        container(
            (2, 80, bytes(48)), (*OWN, own), (1, 90, bytes(24)), (2, 120, bytes(48))
        ),
        container((2, 100, bytes(48))),
        container((1, 80, small), (2, 80, bytes(48)), (1, 80, bytes(len(large)))),
    ]
    assert carried.library(elf(padding.join(before))) == elf(padding.join(after))
    assert carried.keep_one(bytearray(padding.join(before))) == len(own) + len(small)


def test_files_that_are_not_loaded_stay_behind(tmp_path: Path) -> None:
    wheel, packed = tmp_path / "vllm.whl", tmp_path / "vllm.tar.xz"
    fat = container((2, 80, b"\2" * 48))
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("vllm/_C.abi3.so", elf(fat))
        files.writestr("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", elf(fat))
        files.writestr("vllm/envs.py", "x = 1\n")
    carried.pack(wheel, packed, preset=0)
    with tarfile.open(packed) as tar:
        assert tar.getnames() == ["vllm/_C.abi3.so", "vllm/envs.py"]
        read = tar.extractfile("vllm/_C.abi3.so")
        assert read is not None
        assert read.read() == elf(container((2, 80, bytes(48))))
