"""Bounds of the CUDA kernels, by their names in C++.

The kernels' own header says the numbers, and nothing repeats them. A checkout has it,
and so has an installed package.
"""

from __future__ import annotations

import re
from functools import cache

from kvlathe.base.errors import KvlatheError
from kvlathe.base.native_build import SOURCES

HEADER = SOURCES / "src" / "common" / "limits.h"
NUMBER = re.compile(r"^constexpr int(?:64_t)? (k\w+) = (\d+);", re.MULTILINE)


@cache
def kernel_limits() -> dict[str, int]:
    """Every number of limits.h, for example ``kMaxRank``.

    Raises KvlatheError where the header is missing.
    """
    try:
        text = HEADER.read_text("utf-8")
    except OSError as error:
        raise KvlatheError(
            "the limits of the CUDA kernels are unknown",
            f"{HEADER} cannot be read",
            "install kvlathe again",
        ) from error
    return {name: int(number) for name, number in NUMBER.findall(text)}
