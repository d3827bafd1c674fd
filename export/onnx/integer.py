"""The integer products of export/attention/integer.py as ONNX operators: codes go into
MatMulInteger and into nothing else.

Axes: Hs lanes, G query heads a lane, B sequences, Q queries, N cached tokens, g groups
along the rank, n tokens of a group of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from kvlathe.export.attention.integer import LEAST_SCALE, LEVELS, LEVELS_Q
from kvlathe.export.onnx.body import FLOAT, Body

UINT8, BOOL = onnx.TensorProto.UINT8, onnx.TensorProto.BOOL
ZERO_POINT = 128
"""The zero point of symmetric Q: unsigned on both sides is the form that is exact and
fast on every CPU."""


@dataclass(frozen=True)
class Coded:
    """K or V of a bucket: ``codes`` uint8 [Hs, 1, B, N, R]; ``scale``, ``minimum`` and,
    where the tier stores them, ``sums`` of each group's codes, float: [Hs, 1, B, N, g]
    of K and [Hs, 1, B, N / n, R] of V.
    """

    codes: str
    scale: str
    minimum: str
    sums: str | None = None

    def metadata(self, b: Body, *perm: int) -> tuple[str, str, str | None]:
        """Scale, minimum and sums as [Hs, B, groups, 1, 1, tokens or channels]."""
        scale, minimum = (
            b.unsqueeze(b.transpose(x, *perm), 3) for x in (self.scale, self.minimum)
        )
        return (
            scale,
            minimum,
            self.sums and b.unsqueeze(b.transpose(self.sums, *perm), 3),
        )


@dataclass(frozen=True)
class Rounded:
    """integer.Rounded: ``whole`` numbers (as float) [Hs, B, groups, G, Q, elements];
    the others end in [.., 1]."""

    whole: str
    step: str
    low: str | None = None
    count: str | None = None

    @classmethod
    def symmetric(cls, b: Body, x: str, levels: int) -> Rounded:
        largest = b.op("ReduceMax", b.op("Abs", x), b.const([-1]))
        step = b.op("Div", largest, b.float(levels))
        step = b.op("Max", step, b.float(LEAST_SCALE))
        codes = b.op("Round", b.op("Div", x, step))
        return cls(codes, step)

    @classmethod
    def asymmetric(cls, b: Body, x: str, member: str) -> Rounded:
        """The codes of the elements where ``member``, bool, broadcasts against x."""
        count = b.op("ReduceSum", b.cast(member, FLOAT), b.const([-1]))
        low = b.op(
            "ReduceMin", b.op("Where", member, x, b.float(np.inf)), b.const([-1])
        )
        low = b.op("Where", b.op("Greater", count, b.float(0)), low, b.float(0))
        high = b.op(
            "ReduceMax", b.op("Where", member, x, b.float(-np.inf)), b.const([-1])
        )
        step = b.op(
            "Max",
            b.op("Div", b.op("Sub", high, low), b.float(LEVELS)),
            b.float(LEAST_SCALE),
        )
        whole = b.op(
            "Where",
            member,
            b.op("Round", b.op("Div", b.op("Sub", x, low), step)),
            b.float(0),
        )
        return cls(whole, step, low, count)

    def total(self, b: Body) -> str:
        """The sum of each partition."""
        own = b.op("Mul", self.step, self._sums(b))
        return (
            own
            if self.low is None or self.count is None
            else b.op("Add", own, b.op("Mul", self.count, self.low))
        )

    def times(
        self, b: Body, products: str, scale: str, minimum: str, sums: str | None
    ) -> str:
        """Eq. 4 of every partition, from integer products whose rows were ``whole``
        with axes merged."""
        shape = b.op(
            "Concat", b.op("Shape", self.whole, start=0, end=5), b.const([-1]), axis=0
        )
        products = b.cast(b.op("Reshape", products, shape), FLOAT)
        product = b.op(
            "Add", b.op("Mul", products, scale), b.op("Mul", self._sums(b), minimum)
        )
        product = b.op("Mul", self.step, product)
        if self.low is None or self.count is None or sums is None:
            return product
        other = b.op("Add", b.op("Mul", sums, scale), b.op("Mul", self.count, minimum))
        return b.op("Add", product, b.op("Mul", self.low, other))

    def _sums(self, b: Body) -> str:
        return b.op("ReduceSum", self.whole, b.const([-1]))


def scores(b: Body, q: str, k: Coded, groups: str) -> str:
    """q [Hs, G, B, Q, Rk] float times keys; ``groups`` int32 [Hs, g, Rk] -> [Hs, G, B,
    Q, N] float."""
    member = b.cast(b.unsqueeze(groups, 2, 3, 4), BOOL)
    split = b.transpose(
        b.op("Where", member, b.unsqueeze(q, 1), b.float(0)), 0, 3, 1, 2, 4, 5
    )
    if k.sums is None:  # split: [Hs, B, g, G, Q, Rk]
        zero, rounded = ZERO_POINT, Rounded.symmetric(b, split, LEVELS_Q)
    else:
        zero, rounded = (
            0,
            Rounded.asymmetric(b, split, b.transpose(member, 0, 3, 1, 2, 4, 5)),
        )
    first, last = (
        b.op("Shape", rounded.whole, start=0, end=2),
        b.op("Shape", rounded.whole, start=5),
    )
    rows = b.op("Concat", first, b.const([-1]), last, axis=0)
    unsigned = b.op(
        "Reshape", b.cast(b.op("Add", rounded.whole, b.float(zero)), UINT8), rows
    )
    keys = b.op(
        "Squeeze", b.transpose(k.codes, 0, 2, 1, 4, 3), b.const([2])
    )  # [Hs, B, Rk, N]
    products = b.op("MatMulInteger", unsigned, keys, b.const(zero, np.uint8))
    return _added(b, rounded.times(b, products, *k.metadata(b, 0, 2, 4, 1, 3)))


def outputs(b: Body, shares: str, v: Coded, tokens: int) -> str:
    """The mean of values in groups of ``tokens`` under shares [Hs, G, B, Q, N] float ->
    [Hs, G, B, Q, Rv] float."""
    split = b.transpose(
        b.reshape(shares, 0, 0, 0, 0, -1, tokens), 0, 2, 4, 1, 3, 5
    )  # [Hs, B, N/n, G, Q, n]
    if v.sums is None:
        rounded = Rounded.symmetric(b, split, LEVELS)
    else:
        rounded = Rounded.asymmetric(b, split, b.const(np.ones(tokens), np.bool_))
    products = _values_weighted(b, rounded, v, tokens)
    total = _added(b, rounded.times(b, products, *v.metadata(b, 0, 2, 3, 1, 4)))
    return b.op(
        "Div", total, b.op("Max", _added(b, rounded.total(b)), b.float(LEAST_SCALE))
    )


def outputs_by_rank(b: Body, shares: str, v: Coded, groups: str, tokens: int) -> str:
    """As ``outputs``, of values in groups along the rank: ``v``'s metadata is [Hs, 1,
    B, N, g], ``groups`` int32 [Hs, g, Rv]; shares times scales are rounded in
    partitions of ``tokens`` tokens.
    """
    scale = b.unsqueeze(b.transpose(v.scale, 0, 4, 1, 2, 3), 4)  # [Hs, g, 1, B, 1, N]
    parts = b.reshape(
        b.op("Mul", b.unsqueeze(shares, 1), scale), 0, 0, 0, 0, 0, -1, tokens
    )
    rounded = Rounded.symmetric(
        b, b.transpose(parts, 0, 3, 5, 1, 2, 4, 6), LEVELS
    )  # [Hs, B, N/n, g, G, Q, n]
    products = _values_weighted(b, rounded, v, tokens)
    shape = (b.op("Shape", rounded.whole, start=0, end=6), b.const([-1]))
    products = b.cast(b.op("Reshape", products, b.op("Concat", *shape, axis=0)), FLOAT)
    product = b.op(
        "ReduceSum", b.op("Mul", rounded.step, products), b.const([2]), keepdims=0
    )  # [Hs, B, g, G, Q, Rv]
    lowest = b.op("MatMul", shares, v.minimum)  # [Hs, G, B, Q, g]
    lowest = b.unsqueeze(b.transpose(lowest, 0, 2, 4, 1, 3), 5)
    member = b.cast(b.unsqueeze(groups, 1, 3, 4), FLOAT)  # [Hs, 1, g, 1, 1, Rv]
    product = b.op(
        "ReduceSum",
        b.op("Mul", b.op("Add", product, lowest), member),
        b.const([2]),
        keepdims=0,
    )
    return b.transpose(product, 0, 2, 1, 3, 4)


def _values_weighted(b: Body, rounded: Rounded, v: Coded, tokens: int) -> str:
    """Whole shares, the last axis ``tokens`` long, times the codes of values in
    partitions of as many: int32 [Hs, B, N/n, rows, Rv]."""
    values = b.op("Squeeze", v.codes, b.const([1]))  # [Hs, B, N, Rv]
    leading = b.op("Shape", values, start=0, end=2)
    rank = b.op("Shape", values, start=3)
    shape = b.op("Concat", leading, b.const([-1, tokens]), rank, axis=0)
    partitions = b.op("Reshape", values, shape)
    rows = b.reshape(b.cast(rounded.whole, UINT8), 0, 0, 0, -1, tokens)
    return b.op("MatMulInteger", rows, partitions)


def _added(b: Body, x: str) -> str:
    """The sum over partitions: [Hs, B, groups, G, Q, ...] -> [Hs, G, B, Q, ...]."""
    return b.transpose(b.op("ReduceSum", x, b.const([2]), keepdims=0), 0, 2, 1, 3, 4)
