"""Bytes that coders save of real pages, and their speed on one core.

    python -m benchmarks.cold_pages [--model DIR ...] [--only REQUEST ...] [--pages 32]

Every request is built, and windows of ``data/eval_text.jsonl`` go through its cache. The
pages that its buckets of codes then hold (all, where it has none) are encoded one by one,
decoded and compared. "ours": runtime/cache/cold.py. "planes, zstd 1": the same planes of
bytes, each a zstd frame; gathering them is not timed. The others read a page as it lies,
blosc2 with its bits shuffled. ``bfloat16``: the pages of ``none``, their numbers rounded.
Coders that are not installed are left out: ``pip install zstandard lz4 blosc2 zipnn
constriction``. One table and one JSON line a model.
"""

from __future__ import annotations

import functools
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from benchmarks.support.commands import DATA
from benchmarks.support.options import several_models, table_and_json
from kvlathe.base.console import log
from kvlathe.engines.build import build
from kvlathe.engines.config import BuildConfig
from kvlathe.plan.codec import matrices
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.cache.cold import parts_of
from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.coding import Coder, Part, coding_library
from kvlathe.tasks import tasks

BFLOAT16 = "bfloat16"
REQUESTS = (
    "none",
    BFLOAT16,
    "hack:bits=8",
    "hack:bits=4",
    "hack:bits=3",
    "hack:bits=2",
    "hack:bits=4,levels=normal",
    "hack:bits=2,levels=normal",
    "kivi:bits=2",
    "auto",
)
RATIO = 0.9
"""The part of the bytes that ``auto`` removes."""
COLUMNS = (
    "request", "bytes a page", "coder", "saved", "ratio", "encode GB/s", "decode GB/s"
)  # fmt: skip
ROUNDS = 8
WINDOWS, TOKENS = 2, 2048

Page = tuple[int, bytes]
"""A page and its bucket."""
Encode = Callable[[int, bytes], Any]
Decode = Callable[[int, Any], bytes]
Codec = tuple[Encode, Decode]


def pages_of(model: Path, request: str, folder: Path) -> tuple[CacheLayout, list[Page]]:
    """The layout and the pages of a cache after text went through: those of codes, where
    there are any."""
    ratio = RATIO if request == "auto" else None
    config = BuildConfig(
        model, folder / "engine", request, compression_ratio=ratio, workers=1
    )
    kept: list[Page] = []
    with LLM.load(build(config), threads=1) as llm:
        release = llm.pool.release

        def keep(table: PageTable) -> None:
            for bucket, ids in enumerate(table.pages):
                for page in ids:
                    kept.append((bucket, llm.session.read_page(bucket, page)))
            release(table)

        llm.pool.release = keep  # a bench may look
        texts = tasks.read_texts(DATA / "eval_text.jsonl")
        documents = tasks.encode_documents(llm.tokenizer, texts)
        eos = llm.tokenizer.eos_ids[0]
        for window in tasks.windows(documents, eos, WINDOWS, TOKENS):
            llm.logits(window, [len(window) - 1])
        buckets = llm.plan.index.buckets
        coded = [page for page in kept if buckets[page[0]].tier.is_coded]
        return llm.layout, coded or kept


def rounded(page: bytes) -> bytes:
    """IEEE halves as bfloat16, to the nearest, of two the even one."""
    bits = np.frombuffer(page, np.float16).astype(np.float32).view(np.uint32)
    up = (bits >> 16 & 1) + 0x7FFF
    return ((bits + up) >> 16).astype(np.uint16).tobytes()


def turned(part: Part) -> Part:
    return Part(part.rows, part.width, 1, part.matrices)


def one_by_one(encode: Callable[[bytes], Any], decode: Callable[[Any], bytes]) -> Codec:
    """A coder that reads a page as it lies."""
    return lambda _, page: encode(page), lambda _, data: decode(data)


def codecs(layout: CacheLayout, brain: bool, width: int) -> Iterator[tuple[str, Codec]]:
    """Every coder that is installed, by its name in the table. ``brain``: pages hold
    bfloat16; ``width``: bytes of most numbers."""
    sizes = layout.page_stride
    parts = [parts_of(layout, bucket) for bucket in range(len(sizes))]
    if brain:
        parts = [[*map(turned, own)] for own in parts]
    library = coding_library()
    ours = [Coder(library, *of) for of in zip(parts, sizes, strict=True)]
    yield (
        "ours",
        (
            lambda bucket, page: ours[bucket].encode(np.frombuffer(page, np.uint8)),
            lambda bucket, data: ours[bucket].decode(data),
        ),
    )
    if find_spec("zstandard"):
        zstd = import_module("zstandard")
        for level in (1, 9):
            coder = zstd.ZstdCompressor(level=level)
            decoder = zstd.ZstdDecompressor()
            yield f"zstd {level}", one_by_one(coder.compress, decoder.decompress)
    if find_spec("lz4"):
        block = import_module("lz4.block")
        yield "lz4", one_by_one(block.compress, block.decompress)
    yield "deflate 6", one_by_one(zlib.compress, zlib.decompress)
    if find_spec("blosc2"):
        blosc = import_module("blosc2")
        options = {"filter": blosc.Filter.BITSHUFFLE, "codec": blosc.Codec.ZSTD}
        shuffled = functools.partial(
            blosc.compress, typesize=width, clevel=1, **options
        )
        blosc.set_nthreads(1)
        yield "blosc2, bits, zstd 1", one_by_one(shuffled, blosc.decompress)
    if find_spec("zipnn") and width > 1:
        kind = BFLOAT16 if brain else "float16"
        zipped = import_module("zipnn").ZipNN(bytearray_dtype=kind, threads=1)
        yield (
            "zipnn",
            one_by_one(
                lambda page: bytes(zipped.compress(bytearray(page))),  # it writes there
                lambda data: bytes(zipped.decompress(data)),
            ),
        )


def planes_of(page: bytes, parts: Sequence[Part]) -> list[bytes]:
    """The planes of a page that runtime/cache/cold.py gathers, numbers not turned."""
    whole = np.frombuffer(page, np.uint8)
    found: list[bytes] = []
    for part in parts:
        row = np.arange(part.rows)[:, None]
        places = [
            (m.at + row * m.row_stride + np.arange(m.columns) * m.column_stride).ravel()
            for m in part.matrices
        ]
        numbers = np.concatenate(places)
        found += [whole[numbers + i].tobytes() for i in range(part.width)]
    return found


def zstd_of_planes(layout: CacheLayout, pages: list[Page]) -> dict[str, float]:
    """Frames of a page's planes, or the planes where those are not larger."""
    zstd = import_module("zstandard")
    coder, decoder = zstd.ZstdCompressor(level=1), zstd.ZstdDecompressor()
    planes = [
        plane
        for bucket, page in pages
        for plane in planes_of(page, parts_of(layout, bucket))
    ]
    frames, encoding = best(coder.compress, planes)
    _, decoding = best(decoder.decompress, frames)
    least = [min(len(a), len(b)) for a, b in zip(frames, planes, strict=True)]
    whole = sum(len(page) for _, page in pages)
    return saving(whole, sum(least), encoding, decoding)


def saving(
    whole: int, coded: int, encoding: float, decoding: float
) -> dict[str, float]:
    return {
        "saved": 1 - coded / whole,
        "ratio": whole / coded,
        "encode GB/s": whole / encoding / 1e9,
        "decode GB/s": whole / decoding / 1e9,
    }


def best(work: Callable[[Any], Any], items: Sequence[Any]) -> tuple[list[Any], float]:
    """Return what ``work`` makes of each item, and the seconds of one core: of each the fastest
    round."""
    done: list[Any] = []
    seconds = 0.0
    for item in items:
        times: list[float] = []
        for _ in range(ROUNDS):
            started = time.process_time()
            made = work(item)
            times.append(time.process_time() - started)
            del made
        seconds += min(times)
        done.append(work(item))
    return done, seconds


def row(codec: Codec, pages: list[Page]) -> dict[str, float]:
    encode, decode = codec
    coded, encoding = best(lambda page: encode(*page), pages)
    pairs = [(bucket, data) for (bucket, _), data in zip(pages, coded, strict=True)]
    plain, decoding = best(lambda pair: decode(*pair), pairs)
    assert plain == [page for _, page in pages]
    whole = sum(map(len, plain))
    return saving(whole, sum(map(len, coded)), encoding, decoding)


def codes_of(layout: CacheLayout, bucket: int, pages: list[bytes]) -> npt.NDArray[Any]:
    """Codes of every K matrix, [lanes, pages * tokens, rank]; groups along the rank, 2,
    4 or 8 bit."""
    rows = np.stack([np.frombuffer(page, np.uint8) for page in pages])
    found = []
    for keys, _ in matrices(layout, bucket).values():
        bits, size = keys.format.bits, keys.format.data_bytes(keys.rank, keys.tokens)
        data = rows[:, keys.data : keys.data + size]
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = data[..., None] >> shifts & (1 << bits) - 1
        found.append(codes.reshape(-1, keys.rank))
    return np.stack(found)


def by_channel(
    layout: CacheLayout, bucket: int, pages: list[bytes]
) -> dict[str, float]:
    """K's codes under an ANS coder with a table for each channel (constriction); of all
    pages at once, tables not counted. Shares and speeds are of K's codes alone."""
    stream = import_module("constriction").stream

    codes = codes_of(layout, bucket, pages)
    levels = int(codes.max()) + 1
    bits = matrices(layout, bucket)[0][0].format.bits
    words, encoding, decoding = 0, 0.0, 0.0
    for channel in codes.transpose(0, 2, 1).reshape(-1, codes.shape[1]):
        counts = np.bincount(channel, minlength=levels) + 0.5
        model = stream.model.Categorical(counts / counts.sum(), perfect=False)
        symbols = channel.astype(np.int32)
        started = time.process_time()
        coder = stream.stack.AnsCoder()
        coder.encode_reverse(symbols, model)
        encoding += time.process_time() - started
        words += coder.num_words()
        started = time.process_time()
        again = coder.decode(model, len(symbols))
        decoding += time.process_time() - started
        assert np.array_equal(again, symbols)
    whole = codes.size * bits / 8
    return saving(int(whole), 4 * words, encoding, decoding)


def measured(model: Path, request: str, count: int) -> Iterator[dict[str, Any]]:
    """Rows of one request: ``count`` pages from the middle of what was kept."""
    brain = request == BFLOAT16
    with tempfile.TemporaryDirectory() as scratch:
        layout, pages = pages_of(model, "none" if brain else request, Path(scratch))
    first = max(0, (len(pages) - count) // 2)
    pages = pages[first : first + count]
    bucket = pages[0][0]
    if brain:
        pages = [(at, rounded(page)) for at, page in pages]
    size = round(sum(len(page) for _, page in pages) / len(pages))
    about = {"request": request, "bytes a page": size}
    keys = layout.plan.index.buckets[bucket].tier.k
    for name, codec in codecs(layout, brain, keys.unit_bytes):
        yield {**about, "coder": name, **row(codec, pages)}
    if find_spec("zstandard"):
        yield {**about, "coder": "planes, zstd 1", **zstd_of_planes(layout, pages)}
    if (
        request != "auto"
        and find_spec("constriction")
        and keys.along_rank
        and keys.bits in (2, 4, 8)
    ):
        found = by_channel(layout, bucket, [page for _, page in pages])
        yield {**about, "coder": "K's codes, ANS by channel", **found}


@click.command()
@several_models
@click.option("--only", multiple=True, help="Requests.")
@click.option("--pages", default=32, show_default=True)
def main(models: tuple[Path, ...], only: tuple[str, ...], pages: int) -> None:
    """Measure coders on pages of several formats."""
    log.setLevel("ERROR")
    for model in models:
        rows: list[dict[str, Any]] = []
        for request in only or REQUESTS:
            rows += measured(model, request, pages)
        table_and_json("cold_pages", model.name, COLUMNS, rows, model=model.name)


if __name__ == "__main__":
    main()
