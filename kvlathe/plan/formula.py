"""Formulas: arithmetic on the keys and values of one lane, written as text in a plan.

A formula gives each cached token of a lane a number. So a new token score that reads
keys or values is a line of text: the plan carries it as data, and every session
computes it, with numpy on the host or with torch on a GPU. Nothing of it is executed as
Python.

    keys      [n, rank_k]   the cached keys of n tokens, after RoPE, in the lane's basis
    values    [n, rank_v]   the cached values
    norm(x)   [..., r] -> [...]      the Euclidean length
    unit(x)   [..., r] -> [..., r]   x / norm(x)
    mean(x)   [n, ...] -> [...]      over the tokens
    dot(a, b) [..., r] -> [...]      the inner product of rows
    exp(x), + - * / and numbers

Dimensions that a lane does not keep are 0 in both. Orthogonal bases change no length
and no product of two keys. This module imports the standard library alone.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

Array = Any
"""A numpy array or a torch tensor: formulas use what both have."""
Shape = tuple[str, ...]
"""Names of axes: ``n`` tokens, ``rank_k`` and ``rank_v`` dimensions."""

INPUTS: Mapping[str, Shape] = {"keys": ("n", "rank_k"), "values": ("n", "rank_v")}
LEAST = 1e-20
"""Added to lengths, so that the zero vector has a direction."""
LONGEST = 300
"""Characters of a formula. Deeper ones than this allows are refused before they are read."""


def norm(x: Array) -> Array:
    """[..., r] -> [...]"""
    return (x * x).sum(-1) ** 0.5


def unit(x: Array) -> Array:
    """[..., r] -> [..., r]"""
    return x / (norm(x) + LEAST)[..., None]


def mean(x: Array) -> Array:
    """[n, ...] -> [...]"""
    return x.mean(0)


def dot(a: Array, b: Array) -> Array:
    """[..., r], [..., r] -> [...]"""
    return (a * b).sum(-1)


def exp(x: Array) -> Array:
    """The same shape."""
    return math.e**x


FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "norm": norm,
    "unit": unit,
    "mean": mean,
    "dot": dot,
    "exp": exp,
}
OPERATORS: Mapping[type[ast.operator], Callable[[Array, Array], Array]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(formula: str, inputs: Mapping[str, Array]) -> Array:
    """The number of each token [n]. ``inputs``: what INPUTS names, float32 or wider.

    >>> import numpy as np
    >>> evaluate("-norm(keys)", {"keys": np.array([[3.0, 4.0], [0.0, 1.0]])})
    array([-5., -1.])

    Raises ValueError for text that is no formula.
    """
    return _value(_tree(formula), inputs)


def inputs_of(formula: str) -> frozenset[str]:
    """The INPUTS that a formula reads. Raises ValueError for text that is no formula."""
    nodes = ast.walk(_tree(formula))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return frozenset(names & INPUTS.keys())


def check(formula: str) -> None:
    """Raise ValueError, which says why, unless ``formula`` gives one number a token."""
    shape = _shape(_tree(formula))
    if shape != ("n",):
        raise ValueError(f"it gives {list(shape)}, not one number for each token")


def _tree(formula: str) -> ast.expr:
    if len(formula) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST} characters")
    try:
        return ast.parse(formula, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("it is no arithmetic") from None


def _value(node: ast.expr, inputs: Mapping[str, Array]) -> Array:
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, inputs), _value(right, inputs))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, inputs)
        case ast.Call(ast.Name(name), args, []) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_value(arg, inputs) for arg in args))
        case ast.Name(name) if name in INPUTS:
            return inputs[name]
        case ast.Constant(value) if type(value) in (int, float):
            return value
        case _:
            raise ValueError(f"{ast.unparse(node)!r} means nothing in a formula")


def _shape(node: ast.expr) -> Shape:
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return _broadcast(_shape(left), _shape(right))
        case ast.UnaryOp(ast.USub(), operand):
            return _shape(operand)
        case ast.Call(ast.Name(name), args, []) if name in FUNCTIONS:
            return _shape_of_call(name, [_shape(arg) for arg in args])
        case ast.Name(name) if name in INPUTS:
            return INPUTS[name]
        case ast.Constant(value) if type(value) in (int, float):
            return ()
        case _:
            raise ValueError(f"{ast.unparse(node)!r} means nothing in a formula")


def _shape_of_call(name: str, shapes: list[Shape]) -> Shape:
    wanted = 2 if name == "dot" else 1
    if len(shapes) != wanted:
        raise ValueError(f"{name} takes {wanted} and gets {len(shapes)}")
    shape = _broadcast(*shapes) if name == "dot" else shapes[0]
    if name == "exp":
        return shape
    if name == "mean":
        if shape[:1] != ("n",):
            raise ValueError("mean is over tokens, and gets none")
        return shape[1:]
    if not shape or shape[-1] == "n":
        raise ValueError(f"{name} is of vectors, and gets numbers")
    return shape if name == "unit" else shape[:-1]


def _broadcast(a: Shape, b: Shape) -> Shape:
    """The shape of a sum: one of both is the other's end, as arrays broadcast."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    if longer[len(longer) - len(shorter) :] != shorter:
        raise ValueError(f"{list(a)} and {list(b)} do not fit each other")
    return longer
