"""Packs vLLM's wheel for a Hopper GPU whose machine has no network: machine code of
sm_90 alone, without FlashAttention 2 and the sources of kernels.

  pip download --no-deps vllm==0.25.1
  python3 -m benchmarks.carried_vllm vllm-0.25.1-*.whl vllm.tar.xz
  mkdir site; tar xJf vllm.tar.xz -C site    # there; then PYTHONPATH=site

Libraries keep their sizes: code of other architectures becomes zeros, which take no room
under xz. An H200 has loaded the libraries of 0.25.1 so; no model was served with them yet.
What needs other code fails when it is called. vLLM's dependencies are not among it.
"""

from __future__ import annotations

import io
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support.commands import parser_of

ARCHITECTURE = 90
LEFT_OUT = (
    "_vllm_fa2_C",
    "/include/",
    "fmha_sm100/",
    "vllm/vllm-rs",
    "_qutlass_C",
    "helion/configs",
)
"""Parts of the names of files that no text model on Hopper loads."""

MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")
"""A fat binary's header: magic, version, its own bytes, bytes of the entries."""
ENTRY = struct.Struct("<HHIQ")
"""An entry's header: kind, version, its own bytes, bytes of the code."""
ARCHITECTURE_AT = 28
PTX, MACHINE = 1, 2
MOST_PTX = 30_000
"""Bytes of PTX that stay where there is no machine code. What is larger are products
with coded weights."""

SECTION = struct.Struct("<IIQQQQIIQQ")
SECTIONS_AT, SECTION_SIZES_AT = 0x28, 0x3A


def fat_sections(elf: bytes | bytearray) -> Iterator[slice]:
    """Places of the fat binaries of an ELF file of 64 bits."""
    (start,) = struct.unpack_from("<Q", elf, SECTIONS_AT)
    size, count, names = struct.unpack_from("<HHH", elf, SECTION_SIZES_AT)
    sections = [SECTION.unpack_from(elf, start + i * size) for i in range(count)]
    for name, _, _, _, at, length, *_ in sections:
        begin = sections[names][4] + name
        if bytes(elf[begin : elf.index(0, begin)]) == b".nv_fatbin":
            yield slice(at, at + length)


def entries(fat: bytearray, at: int) -> Iterator[tuple[int, int, slice]]:
    """Kind, architecture and code of each entry of the container at ``at``."""
    _, _, header, length = CONTAINER.unpack_from(fat, at)
    at += header
    end = at + length
    while at < end:
        kind, _, header, length = ENTRY.unpack_from(fat, at)
        (architecture,) = struct.unpack_from("<I", fat, at + ARCHITECTURE_AT)
        yield kind, architecture, slice(at + header, at + header + length)
        at += header + length


def keep_one(fat: bytearray) -> int:
    """Zero the code of other architectures in a section of fat binaries. Returns the
    bytes of code that stay."""
    at = kept = 0
    while at + CONTAINER.size <= len(fat):
        magic, _, header, length = CONTAINER.unpack_from(fat, at)
        if magic != MAGIC:  # padding
            at += 8
            continue
        found = list(entries(fat, at))
        served = any(kind_of[:2] == (MACHINE, ARCHITECTURE) for kind_of in found)
        for kind, architecture, code in found:
            size = code.stop - code.start
            is_own = (kind, architecture) == (MACHINE, ARCHITECTURE)
            if is_own or (not served and kind == PTX and size < MOST_PTX):
                kept += size
            else:
                fat[code] = bytes(size)
        at += header + length
    return kept


def library(elf: bytes) -> bytes:
    """A library of the same size, with code for one architecture."""
    made = bytearray(elf)
    for place in fat_sections(elf):
        part = made[place]
        keep_one(part)
        made[place] = part
    return bytes(made)


def pack(wheel: Path, target: Path, preset: int = 6) -> None:
    with (
        zipfile.ZipFile(wheel) as files,
        lzma.open(target, "wb", preset=preset) as out,
        tarfile.open(fileobj=out, mode="w") as tar,
    ):
        for name in files.namelist():
            if any(part in name for part in LEFT_OUT):
                continue
            content = files.read(name)
            if name.endswith(".so"):
                content = library(content)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755
            tar.addfile(info, io.BytesIO(content))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("target", type=Path, help="a .tar.xz")
    options = parser.parse_args()
    pack(options.wheel, options.target)
    before, after = (path.stat().st_size for path in (options.wheel, options.target))
    print(f"{before / 1e6:.1f} MB are {after / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
