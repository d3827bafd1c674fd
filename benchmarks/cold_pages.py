"""Bytes that codecs save of real pages, and their speed on one core.

    python -m benchmarks.cold_pages [--model DIR ...] [--only REQUEST ...] [--pages 32]

Every request is built, and windows of ``data/eval_text.jsonl`` go through its cache. The
pages that its last bucket then holds (sealed ones, where the plan seals) are encoded one
by one, decoded and compared. "split": as runtime/cache/cold.py gathers a page's bytes;
the others read the page as it lies. Codecs that are not installed are left out:
``pip install zstandard lz4 constriction``. One table and one JSON line a model.
"""

from __future__ import annotations

import functools
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
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
from kvlathe.runtime.cache.cold import ZstdPages
from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.llm import LLM
from kvlathe.tasks import tasks

REQUESTS = (
    "none",
    "hack:bits=8",
    "hack:bits=4",
    "hack:bits=3",
    "hack:bits=2",
    "hack:bits=4,levels=normal",
    "hack:bits=2,levels=normal",
    "kivi:bits=2",
)
COLUMNS = ("request", "bytes a page", "codec", "saved", "encode GB/s", "decode GB/s")
ROUNDS = 8
WINDOWS, TOKENS = 2, 2048

Coder = Callable[[bytes], bytes]
Codec = tuple[Coder, Coder]


def pages_of(
    model: Path, request: str, folder: Path
) -> tuple[CacheLayout, int, list[bytes]]:
    """The layout, a bucket, and that bucket's pages after text went through."""
    built = build(BuildConfig(model, folder / "engine", request, workers=1))
    kept: dict[int, list[bytes]] = {}
    with LLM.load(built, threads=1) as llm:
        release = llm.pool.release

        def keep(table: PageTable) -> None:
            for bucket, ids in enumerate(table.pages):
                pages = kept.setdefault(bucket, [])
                pages += [llm.session.read_page(bucket, page) for page in ids]
            release(table)

        llm.pool.release = keep  # a bench may look
        texts = tasks.read_texts(DATA / "eval_text.jsonl")
        documents = tasks.encode_documents(llm.tokenizer, texts)
        eos = llm.tokenizer.eos_ids[0]
        for window in tasks.windows(documents, eos, WINDOWS, TOKENS):
            llm.logits(window, [len(window) - 1])
        bucket = max(bucket for bucket, pages in kept.items() if pages)
        return llm.layout, bucket, kept[bucket]


def codecs(layout: CacheLayout, bucket: int) -> Iterator[tuple[str, Codec]]:
    """Every codec that is installed, by its name in the table."""
    if find_spec("zstandard"):
        import zstandard

        for level in (1, 3, 9):
            coder = zstandard.ZstdCompressor(level=level)
            decoder = zstandard.ZstdDecompressor()
            yield f"zstd {level}", (coder.compress, decoder.decompress)
        for level in (1, 3, 9):
            split = ZstdPages(layout, level)
            encode = functools.partial(split.encode, bucket)
            yield (
                f"split, zstd {level}",
                (encode, functools.partial(split.decode, bucket)),
            )
    if find_spec("lz4"):
        block = import_module("lz4.block")
        yield "lz4", (block.compress, block.decompress)
    yield "deflate 6", (zlib.compress, zlib.decompress)


def best(work: Callable[[], list[bytes]]) -> tuple[list[bytes], float]:
    """The result of ``work``, and the seconds of one core in its fastest round."""
    done: list[bytes] = []
    seconds = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time()
        done = work()
        seconds = min(seconds, time.thread_time() - started)
    return done, seconds


def row(codec: Codec, pages: list[bytes]) -> dict[str, float]:
    encode, decode = codec
    whole = sum(map(len, pages))
    coded, encoding = best(lambda: [encode(page) for page in pages])
    plain, decoding = best(lambda: [decode(page) for page in coded])
    assert plain == pages
    return {
        "saved": 1 - sum(map(len, coded)) / whole,
        "encode GB/s": whole / encoding / 1e9,
        "decode GB/s": whole / decoding / 1e9,
    }


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
        started = time.thread_time()
        coder = stream.stack.AnsCoder()
        coder.encode_reverse(symbols, model)
        encoding += time.thread_time() - started
        words += coder.num_words()
        started = time.thread_time()
        again = coder.decode(model, len(symbols))
        decoding += time.thread_time() - started
        assert np.array_equal(again, symbols)
    whole = codes.size * bits / 8
    return {
        "saved": 1 - 4 * words / whole,
        "encode GB/s": whole / encoding / 1e9,
        "decode GB/s": whole / decoding / 1e9,
    }


def measured(model: Path, request: str, count: int) -> Iterator[dict[str, Any]]:
    """Rows of one request: ``count`` pages from the middle of what was kept."""
    with tempfile.TemporaryDirectory() as scratch:
        layout, bucket, pages = pages_of(model, request, Path(scratch))
    first = max(0, (len(pages) - count) // 2)
    pages = pages[first : first + count]
    about = {"request": request, "bytes a page": len(pages[0])}
    for name, codec in codecs(layout, bucket):
        yield {**about, "codec": name, **row(codec, pages)}
    keys = layout.plan.index.buckets[bucket].tier.k
    if find_spec("constriction") and keys.along_rank and keys.bits in (2, 4, 8):
        found = by_channel(layout, bucket, pages)
        yield {**about, "codec": "K's codes, ANS by channel", **found}


@click.command()
@several_models
@click.option("--only", multiple=True, help="Requests.")
@click.option("--pages", default=32, show_default=True)
def main(models: tuple[Path, ...], only: tuple[str, ...], pages: int) -> None:
    """Measure codecs on pages of several formats."""
    log.setLevel("ERROR")
    for model in models:
        rows: list[dict[str, Any]] = []
        for request in only or REQUESTS:
            rows += measured(model, request, pages)
        table_and_json("cold_pages", model.name, COLUMNS, rows, model=model.name)


if __name__ == "__main__":
    main()
