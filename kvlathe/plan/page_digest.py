"""Digests that tell whether a page has changed: SHA-256 of the sums of its rows.

    page   32-bit words, little-endian, in rows of ROW_WORDS; the last one may be shorter
    sum    of a row: each word (signed) times the weight of its place, modulo 2^64

A GPU makes the sums where the page lies, and a host takes a third of the time of SHA-256
of all bytes. What goes wrong on the way is found: a word that has changed always (weights are
odd), and two bits of a row. Any other change of a row escapes once in 2^32 at most. Whoever
chooses the bytes can make them fit: this guards against accidents, not against attackers.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

WORD_BYTES = 4
ROW_WORDS = 1024
SUM_BYTES = 8
WORD = np.dtype("<i4")
SUM = np.dtype("<i8")
_stream = hashlib.shake_256(b"kvlathe pages").digest(ROW_WORDS * SUM_BYTES)
WEIGHTS: npt.NDArray[np.int64] = np.frombuffer(_stream, SUM) | np.int64(1)
"""Weights of the words of a row: odd, and otherwise without a pattern."""


def row_sums(page: bytes | memoryview) -> npt.NDArray[np.int64]:
    """The sum of each row. Bytes beyond the last whole word count as one with zeros."""
    missing = -len(page) % WORD_BYTES
    if missing:
        page = bytes(page) + bytes(missing)
    words = np.frombuffer(page, WORD)
    left = len(words) % ROW_WORDS
    end = len(words) - left
    sums = np.einsum("rw,w->r", words[:end].reshape(-1, ROW_WORDS), WEIGHTS)
    if not left:
        return sums
    return np.append(sums, np.einsum("w,w->", words[end:], WEIGHTS[:left]))


def digest_of_sums(sums: npt.NDArray[np.int64]) -> str:
    """The digest of the page that has them."""
    return hashlib.sha256(sums.astype(SUM).tobytes()).hexdigest()


def page_digest(page: bytes | memoryview) -> str:
    return digest_of_sums(row_sums(page))
