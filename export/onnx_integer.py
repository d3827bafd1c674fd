"""The integer products of export/integer.py as ONNX operators: codes go into MatMulInteger and into nothing else.

Axes: Hs lanes, G query heads a lane, B sequences, Q queries, N cached tokens, g groups along the rank, n tokens of a
group of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from kvlathe.export.integer import LEAST_SCALE, LEVELS_P, LEVELS_Q
from kvlathe.export.onnx_body import FLOAT, Body

UINT8, BOOL = onnx.TensorProto.UINT8, onnx.TensorProto.BOOL
ZERO_POINT = 128
"""Of Q: unsigned on both sides is the form that is exact and fast on every CPU."""


@dataclass(frozen=True)
class Coded:
    """K or V of a bucket: ``codes`` uint8 [Hs, 1, B, N, R]; ``scale`` and ``minimum`` float, [Hs, 1, B, N, g] of K and
    [Hs, 1, B, N / n, R] of V.
    """

    codes: str
    scale: str
    minimum: str


def quantized(b: Body, x: str, levels: int) -> tuple[str, str]:
    """Whole numbers (float) and their scale [..., 1], symmetric over the last axis."""
    largest = b.op("ReduceMax", b.op("Abs", x), b.const([-1]))
    scale = b.op("Max", b.op("Div", largest, b.float(levels)), b.float(LEAST_SCALE))
    return b.op("Round", b.op("Div", x, scale)), scale


def scores(b: Body, q: str, k: Coded, groups: str) -> str:
    """q [Hs, G, B, Q, Rk] float times keys; ``groups`` int32 [Hs, g, Rk] -> [Hs, G, B, Q, N] float."""
    member = b.cast(b.unsqueeze(groups, 2, 3, 4), BOOL)
    split = b.op("Where", member, b.unsqueeze(q, 1), b.float(0))
    whole, step = quantized(b, b.transpose(split, 0, 3, 1, 2, 4, 5), LEVELS_Q)  # [Hs, B, g, G, Q, Rk]
    rows = b.op("Concat", b.op("Shape", whole, start=0, end=2), b.const([-1]), b.op("Shape", whole, start=5), axis=0)
    unsigned = b.cast(b.op("Add", whole, b.float(ZERO_POINT)), UINT8)
    keys = b.op("Squeeze", b.transpose(k.codes, 0, 2, 1, 4, 3), b.const([2]))  # [Hs, B, Rk, N]
    zero = b.const(ZERO_POINT, np.uint8)
    products = b.op("MatMulInteger", b.op("Reshape", unsigned, rows), keys, zero)
    products = _apart(b, products, whole)
    factor, offset = (
        b.unsqueeze(b.transpose(x, 0, 2, 4, 1, 3), 3) for x in (k.scale, k.minimum)
    )  # [Hs, B, g, 1, 1, N]
    return _corrected(b, products, whole, step, factor, offset)


def outputs(b: Body, shares: str, v: Coded, tokens: int) -> str:
    """The mean of values in groups of ``tokens`` under shares [Hs, G, B, Q, N] float -> [Hs, G, B, Q, Rv] float."""
    split = b.transpose(b.reshape(shares, 0, 0, 0, 0, -1, tokens), 0, 2, 4, 1, 3, 5)  # [Hs, B, N/n, G, Q, n]
    whole, step = quantized(b, split, LEVELS_P)
    values = b.op("Squeeze", v.codes, b.const([1]))  # [Hs, B, N, Rv]
    shape = (b.op("Shape", values, start=0, end=2), b.const([-1, tokens]), b.op("Shape", values, start=3))
    values = b.op("Reshape", values, b.op("Concat", *shape, axis=0))
    products = b.op("MatMulInteger", b.reshape(b.cast(whole, UINT8), 0, 0, 0, -1, tokens), values)
    products = _apart(b, products, whole)
    factor, offset = (
        b.unsqueeze(b.transpose(x, 0, 2, 3, 1, 4), 3) for x in (v.scale, v.minimum)
    )  # [Hs, B, N/n, 1, 1, Rv]
    total = _corrected(b, products, whole, step, factor, offset)
    mass = _added(b, b.op("Mul", step, b.op("ReduceSum", whole, b.const([-1]))))
    return b.op("Div", total, b.op("Max", mass, b.float(LEAST_SCALE)))


def _apart(b: Body, products: str, whole: str) -> str:
    """Integer products whose rows were ``whole`` with axes merged, as float [Hs, B, groups, G, Q, ...]."""
    shape = b.op("Concat", b.op("Shape", whole, start=0, end=5), b.const([-1]), axis=0)
    return b.cast(b.op("Reshape", products, shape), FLOAT)


def _corrected(b: Body, products: str, whole: str, step: str, factor: str, offset: str) -> str:
    """Eq. 4 and the sum over partitions: [Hs, B, groups, G, Q, ...] -> [Hs, G, B, Q, ...]."""
    sums = b.op("ReduceSum", whole, b.const([-1]))
    return _added(b, b.op("Mul", step, b.op("Add", b.op("Mul", products, factor), b.op("Mul", sums, offset))))


def _added(b: Body, x: str) -> str:
    """The sum over partitions: [Hs, B, groups, G, Q, ...] -> [Hs, G, B, Q, ...]."""
    return b.transpose(b.op("ReduceSum", x, b.const([2]), keepdims=0), 0, 2, 1, 3, 4)
