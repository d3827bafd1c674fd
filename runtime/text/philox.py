"""Random numbers by their place in a stream: Philox4x64-10, a counter-based generator
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

Number n of a seed's stream needs none of those before it. So all rows of a batch draw
in one call, and what a request draws does not depend on its neighbours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
UInt64 = npt.NDArray[np.uint64]

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
"""The paper's constants: of its products (table 2), and added to the key a round."""
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)


def uniform(seeds: UInt64, counts: UInt64) -> Float64:
    """Random number ``counts[i]`` of the stream of ``seeds[i]``, in [0, 1): what numpy's
    Generator(Philox(key=seed)).random() gives at its call of that number."""
    blocks = counts // np.uint64(4) + np.uint64(1)
    words = philox(seeds, blocks)  # [n, 4]
    chosen = np.take_along_axis(words, (counts % np.uint64(4)).astype(int)[:, None], 1)
    top = chosen[:, 0] >> np.uint64(11)  # 53 bits: exact in a double
    return top.astype(np.float64) * 2.0**-53


def philox(keys: UInt64, counters: UInt64) -> UInt64:
    """Philox4x64-10 [n, 4] of the keys (key, 0) and the counters (counter, 0, 0, 0)."""
    zeros = np.zeros_like(counters)
    x0, x1, x2, x3 = counters, zeros, zeros, zeros
    key0, key1 = keys.copy(), np.zeros_like(keys)
    with np.errstate(over="ignore"):
        for _ in range(ROUNDS):
            high0, low0 = _product(x0, MULTIPLIERS[0])
            high1, low1 = _product(x2, MULTIPLIERS[1])
            x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
            key0 = key0 + np.uint64(WEYL[0])
            key1 = key1 + np.uint64(WEYL[1])
    return np.stack([x0, x1, x2, x3], axis=1)


def _product(x: UInt64, factor: int) -> tuple[UInt64, UInt64]:
    """High and low 64 bits of x * factor."""
    shift = np.uint64(32)
    factor_high, factor_low = np.uint64(factor >> 32), np.uint64(factor & 0xFFFFFFFF)
    x_high, x_low = x >> shift, x & LOW
    middle = x_high * factor_low + (x_low * factor_low >> shift)
    other = x_low * factor_high + (middle & LOW)
    high = x_high * factor_high + (middle >> shift) + (other >> shift)
    return high, x * np.uint64(factor)
