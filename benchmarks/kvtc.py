"""KVTC (arXiv 2511.01815) as far as stored bytes and accuracy go, beside pages that can
be attended. For comparison only.

    python -m benchmarks.kvtc [--model DIR ...] [--ratio 8 --ratio 16 --ratio 32] [--windows 4]

It stores a cache and cannot attend it: every token's keys, their RoPE undone, are one row
over all layers and heads, and values likewise; PCA with a mean, bits by dynamic
programming, DEFLATE. The first 4 tokens and the last 128 stay in 16 bit. Where the paper
leaves room: components go in blocks of 16, 64 or 256 with 0, 2, 4 or 8 bits, and a block
of a token has a scale and a minimum in 16 bit; the program weighs squared errors of
calibration text against bits at one price, found by bisection.

A prompt of 1,536 tokens goes through an uncompressed engine, its pages are coded, decoded
and written back, and the next 512 tokens are scored. "stored" is of the 16-bit bytes of
that prompt. The rows beside it are engines that attend their own pages, scored on the
same 512 tokens; their pages are coded as they lie by runtime/cache/cold.py, too.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
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
from kvlathe.export.model.spec import read_spec
from kvlathe.plan.codec import matrices
from kvlathe.runtime.cache.cold import CodedPages
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.forced import ForcedText
from kvlathe.tasks import tasks
from kvlathe.tasks.metrics import Sums

Rows = npt.NDArray[np.floating]
PROMPT, WINDOW = 1536, 2048
SINK, RECENT = 4, 128
SIZES, BITS = (16, 64, 256), (0, 2, 4, 8)
STEP = SIZES[0]
SCALES = 32
"""Bits of a block's scale and minimum."""
CALIBRATION = 4
"""Windows of calibration text."""
BESIDE = ("hack:bits=4", "duo:share=0.25+hack:bits=4", "auto@0.9")
COLUMNS = ("stored as", "stored", "stored, coded", "attends", "perplexity ratio")


class Prompt(ForcedText):
    """A text whose pages are at hand once PROMPT tokens are in the cache."""

    def __init__(self, llm: LLM, tokens: list[int], rows: Sequence[int]) -> None:
        super().__init__(llm.engine, llm._sequences, tokens, rows, None)
        self.llm = llm
        self.seen: list[tuple[int, bytes]] = []
        self.rewrite: Codec | None = None

    def keep(self, rows: Rows) -> int:
        count = super().keep(rows)
        if self._sequence.cached == PROMPT:
            self._look()
        return count

    def _look(self) -> None:
        table = self._sequence.table
        for bucket, ids in enumerate(table.pages):
            self.seen += [(bucket, self.llm.session.read_page(bucket, i)) for i in ids]
        if self.rewrite is None:
            return
        keys, values = rows_of(self.llm, [page for _, page in self.seen])
        keys, values = self.rewrite.k.through(keys), self.rewrite.v.through(values)
        pages = pages_of(self.llm, keys, values, [page for _, page in self.seen])
        for page, data in zip(table.pages[0], pages, strict=True):
            self.llm.session.write_page(0, page, data)


# -- pages and rows --------------------------------------------------------------------
def turned(llm: LLM, model: Path, keys: Rows, back: bool) -> Rows:
    """keys [tokens, lanes, d] turned by their positions, or back."""
    rope = read_spec(model).rope
    if rope is None:
        return keys
    angles = np.outer(np.arange(len(keys)), rope.inv_freq)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    if back:
        sin = -sin
    first, second = np.split(keys, 2, axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    return np.concatenate(pair, -1).astype(np.float32)


def rows_of(llm: LLM, pages: Sequence[bytes]) -> tuple[Rows, Rows]:
    """K and V of an uncompressed 16-bit bucket: [tokens, lanes * d], RoPE undone."""
    table = np.stack([np.frombuffer(page, np.uint8) for page in pages])
    sides: tuple[list[Rows], list[Rows]] = ([], [])
    for pair in matrices(llm.layout, 0).values():
        for matrix, side in zip(pair, sides, strict=True):
            size = matrix.format.data_bytes(matrix.rank, matrix.tokens)
            data = table[:, matrix.data : matrix.data + size].copy()
            side.append(
                data.view(np.float16).reshape(-1, matrix.rank).astype(np.float32)
            )
    keys, values = (np.stack(side, 1) for side in sides)
    keys = turned(llm, MODEL[0], keys, back=True)
    return keys.reshape(len(keys), -1), values.reshape(len(values), -1)


def pages_of(
    llm: LLM, keys: Rows, values: Rows, before: Sequence[bytes]
) -> list[bytes]:
    """The pages with other K and V."""
    pages = [np.frombuffer(page, np.uint8).copy() for page in before]
    lanes = len(llm.plan.lanes)
    turn = turned(llm, MODEL[0], keys.reshape(len(keys), lanes, -1), back=False)
    of_lanes = (turn, values.reshape(len(values), lanes, -1))
    p = llm.plan.page_tokens
    for lane, pair in matrices(llm.layout, 0).items():
        for matrix, side in zip(pair, of_lanes, strict=True):
            for i, page in enumerate(pages):
                data = side[i * p : (i + 1) * p, lane].astype(np.float16).tobytes()
                page[matrix.data : matrix.data + len(data)] = np.frombuffer(
                    data, np.uint8
                )
    return [page.tobytes() for page in pages]


MODEL: list[Path] = []
"""The model at hand."""


# -- the coder -------------------------------------------------------------------------
@dataclass(frozen=True)
class Block:
    first: int
    size: int
    bits: int

    @property
    def cost(self) -> int:
        """Bits of a token."""
        return self.size * self.bits + SCALES if self.bits else 0


def quantized(x: Rows, bits: int) -> tuple[npt.NDArray[np.uint8], Rows]:
    """Codes of x [tokens, n], a scale and a minimum a token, and what they stand for."""
    low = x.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    width = (x.max(-1, keepdims=True) - low) / (2**bits - 1)
    scale = np.maximum(width, 1e-6).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((x - low) / scale), 0, 2**bits - 1)
    return codes.astype(np.uint8), codes * scale + low


@dataclass(frozen=True)
class Side:
    """The coder of all keys, or of all values: ``basis`` [D, D], leading first."""

    mean: Rows
    basis: Rows
    blocks: tuple[Block, ...]

    def through(self, x: Rows) -> Rows:
        """Rows of a prompt as they come back; the first and last ones as they are."""
        y = (x - self.mean) @ self.basis
        for block in self.blocks:
            part = slice(block.first, block.first + block.size)
            y[:, part] = quantized(y[:, part], block.bits)[1] if block.bits else 0.0
        back = y @ self.basis.T + self.mean
        back[:SINK], back[-RECENT:] = x[:SINK], x[-RECENT:]
        return back

    def stored(self, x: Rows) -> int:
        """Bytes after DEFLATE, block by block, codes packed and scales behind them."""
        y = (x[SINK:-RECENT] - self.mean) @ self.basis
        size = 2 * x.shape[1] * (SINK + RECENT)
        for block in self.blocks:
            if not block.bits:
                continue
            part = y[:, block.first : block.first + block.size]
            codes, _ = quantized(part, block.bits)
            per = 8 // block.bits
            shifts = block.bits * np.arange(per)
            packed = (codes.reshape(-1, per) << shifts).sum(-1).astype(np.uint8)
            scales = 4 * len(part)
            size += len(zlib.compress(packed.tobytes(), 6)) + scales
        return size


@dataclass(frozen=True)
class Codec:
    k: Side
    v: Side


def errors_of(y: Rows) -> dict[tuple[int, int, int], float]:
    """(first, size, bits) -> squared error a token, of every block there can be."""
    found = {}
    for size in SIZES:
        for first in range(0, y.shape[1] - size + 1, STEP):
            part = y[:, first : first + size]
            for bits in BITS:
                left = part - quantized(part, bits)[1] if bits else part
                found[first, size, bits] = float(np.square(left).sum(-1).mean())
    return found


def cheapest(
    errors: dict[tuple[int, int, int], float], width: int, price: float
) -> tuple[Block, ...]:
    """Blocks of least error + price x bits: the shortest path over components."""
    best = {0: (0.0, ())}
    for end in range(STEP, width + 1, STEP):
        ways = []
        for size in SIZES:
            if size > end:
                continue
            lost, path = best[end - size]
            for bits in BITS:
                block = Block(end - size, size, bits)
                cost = errors[end - size, size, bits] + price * block.cost
                ways.append((lost + cost, (*path, block)))
        best[end] = min(ways, key=lambda way: way[0])
    return best[width][1]


def calibrated(keys: Rows, values: Rows, ratio: float) -> Codec:
    """A coder of ``ratio`` times fewer bits than 16 a number, before DEFLATE."""
    bases, errors = [], []
    for x in (keys, values):
        mean = x.mean(0)
        spread = np.cov((x - mean).T.astype(np.float64))
        basis = np.linalg.eigh(spread)[1][:, ::-1].astype(np.float32)
        bases.append((mean, np.ascontiguousarray(basis)))
        errors.append(errors_of((x - mean)[::4] @ basis))
    width = keys.shape[1]
    budget = 2 * 16 * width / ratio
    low, high = -12.0, 6.0  # powers of ten
    for _ in range(24):
        middle = (low + high) / 2
        found = [cheapest(of_side, width, 10**middle) for of_side in errors]
        spent = sum(block.cost for blocks in found for block in blocks)
        low, high = (middle, high) if spent > budget else (low, middle)
    found = [cheapest(of_side, width, 10**high) for of_side in errors]
    sides = []
    for (mean, basis), blocks in zip(bases, found, strict=True):
        sides.append(Side(mean, basis, blocks))
    return Codec(sides[0], sides[1])


# -- measuring -------------------------------------------------------------------------
def scored(
    llm: LLM, windows: list[list[int]], codec: Codec | None = None
) -> tuple[Sums, list[list[tuple[int, bytes]]]]:
    """The last tokens of every window behind its prompt, and every prompt's pages."""
    total, seen = Sums(), []
    rows = range(PROMPT, WINDOW - 1)
    for window in windows:
        text = Prompt(llm, window, rows)
        text.rewrite = codec
        logits = llm.thread.call(lambda text=text: text.logits(lambda: False))
        total += Sums.of(logits, np.array(window[PROMPT + 1 :]))
        seen.append(text.seen)
    return total, seen


def windows_of(llm: LLM, name: str, count: int) -> list[list[int]]:
    texts = tasks.read_texts(DATA / name)
    documents = tasks.encode_documents(llm.tokenizer, texts)
    return tasks.windows(documents, llm.tokenizer.eos_ids[0], count, WINDOW)


def engine(model: Path, request: str, folder: Path) -> LLM:
    name, _, ratio = request.partition("@")
    share = float(ratio) if ratio else None
    asked = BuildConfig(model, folder, name, compression_ratio=share)
    return LLM.load(build(asked))


def kvtc_rows(
    llm: LLM,
    windows: list[list[int]],
    ratios: Sequence[float],
    plain: float,
    whole: int,
) -> list[dict[str, Any]]:
    train = [
        rows_of(llm, [p for _, p in pages])
        for pages in scored(
            llm, windows_of(llm, "calibration_text.jsonl", CALIBRATION)
        )[1]
    ]
    keys = np.concatenate([k for k, _ in train])
    values = np.concatenate([v for _, v in train])
    lines = []
    for ratio in ratios:
        codec = calibrated(keys, values, ratio)
        sums, seen = scored(llm, windows, codec)
        held = 0
        for pages in seen:
            k, v = rows_of(llm, [page for _, page in pages])
            held += codec.k.stored(k) + codec.v.stored(v)
        line = {
            "stored as": f"kvtc, {ratio:g} times before DEFLATE",
            "stored": held / whole,
            "attends": "no",
            "perplexity ratio": sums.perplexity / plain,
        }
        lines.append(line)
    return lines


@click.command()
@several_models
@click.option("--ratio", "ratios", multiple=True, type=float, default=(8.0, 16.0, 32.0))
@click.option("--windows", "count", default=4, show_default=True)
@click.option("--beside", multiple=True, default=BESIDE, help="Requests beside it.")
def main(
    models: tuple[Path, ...],
    ratios: tuple[float, ...],
    count: int,
    beside: tuple[str, ...],
) -> None:
    """Measure stored bytes and what they cost."""
    log.setLevel("ERROR")
    for model in models:
        MODEL[:] = [model]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            with engine(model, "none", folder / "none") as llm:
                windows = windows_of(llm, "eval_text.jsonl", count)
                sums, seen = scored(llm, windows)
                whole = sum(len(page) for pages in seen for _, page in pages)
                plain = sums.perplexity
                lines = kvtc_rows(llm, windows, ratios, plain, whole)
            for i, request in enumerate(("none", *beside)):
                with engine(model, request, folder / f"engine{i}") as llm:
                    sums, seen = scored(llm, windows)
                    codec = CodedPages(llm.layout)
                    pages = [pair for of_prompt in seen for pair in of_prompt]
                    line = {
                        "stored as": request,
                        "stored": sum(len(data) for _, data in pages) / whole,
                        "stored, coded": sum(len(codec.encode(*x)) for x in pages)
                        / whole,
                        "attends": "yes",
                        "perplexity ratio": sums.perplexity / plain,
                    }
                    lines.append(line)
        title = f"{model.name}: prompts of {PROMPT} tokens"
        table_and_json("kvtc", title, COLUMNS, lines, model=model.name)


if __name__ == "__main__":
    main()
