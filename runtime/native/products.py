"""The calls of products.h: products with weights that are codes, on a GPU."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_uint32, c_void_p

MOST_ROWS = 16
"""KVLATHE_MAX_PRODUCT_ROWS: of a call."""


class ProductArgs(Structure):
    """kvlathe_product_args of products.h."""

    _fields_ = [
        ("abi_version", c_uint32),
        ("element", c_int32),
        ("rows", c_int32),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("scale_stride", c_int32),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("stream", c_void_p),
    ]
