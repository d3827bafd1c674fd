"""Cached tokens in the exported function: where they lie in the pool's pages, and K and
V read from there.

Sizes: B sequences, M pages of a sequence, P tokens a page, N = M * P places, Hs lanes
of the bucket, R the widest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvlathe.export.attention.tables import PlanFacts
from kvlathe.export.onnx import integer as onnx_integer
from kvlathe.export.onnx.body import FLOAT, INT32, Body
from kvlathe.plan.codec import worths
from kvlathe.plan.formats import Format
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.packing import byte_codes
from kvlathe.plan.plan import CompressionPlan

NEVER = -1e30
"""A score that no softmax sees. Finite: padding rows must not make NaN out of
infinities."""


class Places:
    """The cached tokens of every sequence in one bucket: N = M * P places, those past
    the length repeat the last."""

    def __init__(self, body: Body, plan: CompressionPlan, bucket: int) -> None:
        b, p = body, plan.page_tokens
        self.body = body
        self.plan = plan
        self.bucket = bucket
        self.table = f"page_table_{bucket}"
        self.stride = CacheLayout(plan).page_stride[bucket]
        length = b.gather("lengths", b.int32([bucket]), 1)  # [B, 1]
        pages = b.op("Shape", self.table, start=1, end=2)
        every = b.arange(b.op("Squeeze", b.op("Mul", pages, b.const([p]))))  # [N]
        self.every = every
        token = b.op(
            "Min", every, b.op("Max", b.op("Sub", length, b.int32(1)), b.int32(0))
        )  # [B, N]
        self.page, self.place = (
            b.op("Div", token, b.int32(p)),
            b.op("Mod", token, b.int32(p)),
        )
        past = b.op("LessOrEqual", length, every)
        self.mask = b.unsqueeze(
            b.op("Where", past, b.float(NEVER), b.float(0)), 1
        )  # [B, 1, N]
        self.none = b.op("LessOrEqual", length, b.int32(0))  # [B, 1]
        self.empty = b.unsqueeze(self.none, 1)  # [B, 1, 1]

    def _stride(self, bits: int) -> str:
        return self.body.int32(self.stride * 8 // bits // self.plan.index.unit)

    def base(self, bits: int) -> str:
        """First unit row of each token's page, [B, N, 1]."""
        b = self.body
        first = b.op(
            "Mul",
            b.op("GatherElements", self.table, self.page, axis=1),
            self._stride(bits),
        )
        return b.unsqueeze(first, 2)

    def page_base(self, bits: int) -> str:
        """First unit row of each page, [B, M]."""
        return self.body.op("Mul", self.table, self._stride(bits))

    def elements(self, data: str, places: str, group: int) -> str:
        """Flat places in data [B, M, E] of the elements of every ``group``-th token:
        [Hs, 1, B, N / group, R]."""
        b = self.body
        shape = b.cast(b.op("Shape", data), INT32)
        pages, size = b.slice(shape, 1, 2), b.slice(shape, 2, 3)
        sequence = b.unsqueeze(
            b.arange(b.op("Squeeze", b.op("Shape", "lengths", start=0, end=1))), 1
        )
        page, place = self.page, self.place
        if group > 1:
            steps = (
                b.const([0]),
                b.const([np.iinfo(np.int64).max]),
                b.const([1]),
                b.const([group]),
            )
            page, place = (b.op("Slice", x, *steps) for x in (page, place))
            place = b.op("Div", place, b.int32(group))
        first = b.op("Mul", b.op("Add", b.op("Mul", sequence, pages), page), size)
        return b.op("Add", b.gather(places, place, 2), b.unsqueeze(first, 2))


@dataclass(frozen=True)
class PageReader:
    """Writes the nodes that read K or V (``x`` is k or v) of a bucket. ``dtype``: onnx
    FLOAT or FLOAT16, the op's own."""

    plan: CompressionPlan
    dtype: int
    facts: PlanFacts
    body: Body

    def read(self, x: str, tokens: Places) -> str:
        """K or V of a bucket [Hs, 1, B, N, R] in the op's type."""
        b, bucket = self.body, tokens.bucket
        form = self.facts.format(bucket, x)
        if not form.is_coded:
            first = b.op(
                "Add",
                b.op("Mul", b.unsqueeze(tokens.place, 2), f"{x}_steps_{bucket}"),
                tokens.base(form.bits),
            )
            rows = b.op("Add", first, f"{x}_units_{bucket}")
            return b.cast(
                b.reshape(b.gather(form.pool, rows, 0), 0, 0, 0, 0, -1),
                self.dtype,
            )
        scale, minimum = self.metadata(x, tokens)
        codes = b.cast(self.codes(x, tokens), FLOAT)
        if form.along_rank:
            groups = b.cast(f"{x}_groups_{bucket}", FLOAT)
            member = b.unsqueeze(groups, 1, 2)  # [Hs, 1, 1, g, R]
            values = b.op("Mul", codes, b.op("MatMul", scale, member))
            if minimum is not None:
                values = b.op("Add", values, b.op("MatMul", minimum, member))
            return b.cast(values, self.dtype)
        parts = (
            b.op("Shape", scale, start=0, end=4),
            b.const([self.facts.steps(bucket, x)]),
            b.op("Shape", scale, start=4),
        )
        codes = b.op(
            "Reshape", codes, b.op("Concat", *parts, axis=0)
        )  # [Hs, 1, B, N/n, n, R]
        values = b.op("Mul", codes, b.unsqueeze(scale, 4))
        if minimum is not None:
            values = b.op("Add", values, b.unsqueeze(minimum, 4))
        return b.cast(self.joined(values), self.dtype)

    def joined(self, x: str) -> str:
        """[Hs, 1, B, i, j, R] -> [Hs, 1, B, i * j, R]."""
        b = self.body
        sizes = (
            b.op("Shape", x, start=0, end=3),
            b.const([-1]),
            b.op("Shape", x, start=5),
        )
        return b.op("Reshape", x, b.op("Concat", *sizes, axis=0))

    def coded(self, x: str, tokens: Places) -> onnx_integer.Coded:
        """K or V of a bucket for products of integers: codes [Hs, 1, B, N, R], metadata
        one number a group."""
        scale, minimum = self.metadata(x, tokens)
        assert minimum is not None  # whole numbers have one (Decoding.is_whole)
        tier, steps = self.facts.tier(tokens.bucket), self.facts.steps(tokens.bucket, x)
        sums = self.sums(x, tokens, steps) if tier.sums else None
        return onnx_integer.Coded(self.codes(x, tokens), scale, minimum, sums)

    def metadata(self, x: str, tokens: Places) -> tuple[str, str | None]:
        """Scale and minimum of each group, float; no minimum where it is 0."""
        b, bucket = self.body, tokens.bucket
        meta = self.per_page("pool_f16", f"{x}_meta_{bucket}", 16, tokens)
        scale_at = tokens.elements(
            meta, f"{x}_meta_at_{bucket}", self.facts.steps(bucket, x)
        )
        halves = b.reshape(meta, -1)
        first = b.gather(halves, scale_at, 0)
        first = b.cast(first, FLOAT)
        decoding = self.facts.format(bucket, x).decoding
        if decoding.has_minimum:
            minimum_at = b.op("Add", scale_at, b.int32(1))
            return first, b.cast(b.gather(halves, minimum_at, 0), FLOAT)
        scale = b.op("Mul", first, b.float(decoding.step))
        if not decoding.lowest:
            return scale, None
        return scale, b.op("Mul", first, b.float(decoding.lowest))

    def codes(self, x: str, tokens: Places) -> str:
        """The worth of a bucket's codes [Hs, 1, B, N, R]: uint8 where it is a whole
        number."""
        b, bucket, page = self.body, tokens.bucket, self.plan.page_tokens
        form = self.facts.format(bucket, x)
        size = self.facts.piece(form)
        data = self.per_page("pool_u8", f"{x}_codes_{bucket}", 8, tokens)
        data = b.reshape(data, 0, 0, -1, size)
        group = 1 if form.along_rank else page
        at = tokens.elements(data, f"{x}_code_at_{bucket}", group)
        codes = self.unpacked(b.gather(b.reshape(data, -1, size), at, 0), form, size)
        if form.along_rank:
            return b.reshape(codes, 0, 0, 0, 0, -1)
        by_token = b.transpose(b.reshape(codes, 0, 0, 0, 0, -1, page), 0, 1, 2, 3, 5, 4)
        return self.joined(by_token)

    def sums(self, x: str, tokens: Places, group: int) -> str:
        """The stored sums of the groups' codes, float, in the places of their
        metadata."""
        b = self.body
        width = self.facts.format(tokens.bucket, x).sum_bytes
        data = self.per_page("pool_u8", f"{x}_sums_{tokens.bucket}", 8, tokens)
        at = tokens.elements(data, f"{x}_sums_at_{tokens.bucket}", group)
        places = [at, *(b.op("Add", at, b.int32(i)) for i in range(1, width))]
        parts = [
            b.cast(b.gather(b.reshape(data, -1), place, 0), FLOAT) for place in places
        ]
        total = parts[0]
        for i, part in enumerate(parts[1:], 1):
            total = b.op("Add", total, b.op("Mul", part, b.float(256**i)))
        return total

    def unpacked(self, data: str, form: Format, size: int) -> str:
        """Pieces of ``size`` bytes [Hs, 1, B, N, n, size] -> what their codes are worth,
        [Hs, 1, B, N, n / runs, codes], uint8 or float. A byte's codes are looked up: shifting it by each
        of their places is ten times slower in ONNX Runtime."""
        b = self.body
        if not form.needs_table:
            return data
        shares = byte_codes(form)
        table = worths(form)
        data = b.cast(data, INT32)
        data = b.reshape(data, 0, 0, 0, 0, -1, form.runs, size)
        if form.runs == 1:
            of_byte = b.const(table[shares[0]], table.dtype.type)
            worth = b.gather(of_byte, data, 0)
        else:
            firsts = 256 * np.arange(form.runs)[:, None]
            of_byte = b.int32(shares.reshape(-1, form.together))
            share = b.gather(of_byte, b.op("Add", data, b.int32(firsts)), 0)
            codes = b.op("ReduceSum", share, b.const([5]), keepdims=0)
            worth = b.gather(b.const(table, table.dtype.type), codes, 0)
        return b.reshape(worth, 0, 0, 0, 0, -1, size * form.together)

    def per_page(self, pool: str, rows: str, bits: int, tokens: Places) -> str:
        """One kind of data of all pages of the table: [B, M, elements of a page]."""
        b = self.body
        at = b.op("Add", b.unsqueeze(tokens.page_base(bits), 2), rows)
        return b.reshape(b.gather(pool, at, 0), 0, 0, -1)
