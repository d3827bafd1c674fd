"""Chunks of K and V of any engine, in the pages of a plan.

    chunk   [2, layers, tokens, hidden] of float16 or bfloat16, as LMCache has it
    page    64 of its tokens: codes of ``bits``, or the numbers themselves
    data    head | a length for each page | pages, as they are or coded as cold pages are

A page of codes is what kvlathe/plan/layout.py says of a plan whose heads have SLICE channels:
groups do not know where an engine's heads begin. Pages with numbers that are none, or too
large for a half, keep their numbers, and so do the last tokens that fill no page.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import PageMatrix, matrices
from kvlathe.plan.formats import Bits, Format, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.plan.packing import byte_codes, unpack
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.cache.cold import parts_of
from kvlathe.runtime.native.coding import Coder, Matrix, Part, coding_library
from kvlathe.runtime.native.cpu import PageWriter

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
"""Numbers of 16 bits, whatever they stand for."""
MAGIC = b"KVLC"
VERSION = 2
PAGE = 64
"""Tokens of a page."""
SLICE = 64
"""Channels of a lane, at most."""
LOSSLESS = 16
BITS = (16, 8, 4, 3, 2)
KEPT = 1 << 31
"""In a page's length: it holds numbers, no codes."""
HEAD = struct.Struct("<4s2BH5I")


@dataclass(frozen=True)
class ChunkForm:
    """A chunk's shape. ``sides``: 2, K and V; 1 where heads share a latent. ``brain``:
    its numbers are bfloat16. ``head_dim``: of heads whose K and V lay side by side
    (sides.py); None where they did not, or nobody said it."""

    sides: int
    layers: int
    tokens: int
    hidden: int
    brain: bool
    head_dim: int | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.sides, self.layers, self.tokens, self.hidden


def check_options(bits: int, cold: bool) -> None:
    """Raises KvlatheError for what no chunk can be coded with."""
    if bits not in BITS:
        raise KvlatheError(
            f"{bits} bits were asked for",
            "K and V are coded in 16, 8, 4, 3 or 2",
            "choose one of these",
        )
    if bits == LOSSLESS and not cold:
        raise KvlatheError(
            "16 bits were asked for, and no coding",
            "chunks would be as large as they are",
            "ask for fewer bits, or for cold",
        )


class ChunkCodec:
    """Codes chunks of one form. ``bits``: 16 loses nothing. ``cold``: pages are coded as
    cold pages are, and a chunk takes as many bytes as it takes. Without, all take
    ``bound``.

    Raises KvlatheError for a form that cannot be coded so, and where there is no native
    library.
    """

    def __init__(self, form: ChunkForm, bits: int, cold: bool = True) -> None:
        check_options(bits, cold)
        self.form = form
        self.bits = bits
        self.cold = cold
        self._library = coding_library()
        self._kept = {tokens: self._coder(tokens) for tokens in {*self._tokens}}
        self.pages: _Pages | None = None
        if bits != LOSSLESS and form.sides != 2:
            raise KvlatheError(
                "heads that share a latent were sent",
                f"in {bits} bits K and V are coded apart",
                "ask for 16 bits, which lose nothing",
            )
        if bits != LOSSLESS and form.tokens >= PAGE:
            self.pages = _Pages(form, _tier(bits), cold)

    @cached_property
    def bound(self) -> int:
        """Bytes that every chunk fits into; those that each takes, where it is not
        cold."""
        sizes = [self._kept[tokens].bound for tokens in self._tokens]
        if not self.cold:
            sizes = [self._plain_size(tokens) for tokens in self._tokens]
        return HEAD.size + 4 * len(sizes) + sum(sizes)

    def _plain_size(self, tokens: int) -> int:
        if self.pages and tokens == PAGE:
            return self.pages.size
        return self._kept[tokens].size

    @property
    def _tokens(self) -> list[int]:
        """Tokens of each page."""
        whole, rest = divmod(self.form.tokens, PAGE)
        return [PAGE] * whole + [rest] * (rest > 0)

    def encode(self, chunk: Words) -> bytes:
        """``chunk`` [sides, layers, tokens, hidden] in fewer bytes."""
        lengths: list[int] = []
        bodies: list[bytes] = []
        for numbers in self._split(chunk):
            body = None
            if self.pages and numbers.shape[2] == PAGE:
                body = self.pages.encode(numbers)
            if body:
                lengths.append(len(body))
            else:
                body = self._kept_body(np.ascontiguousarray(numbers))
                lengths.append(len(body) | KEPT)
            bodies.append(body)
        sizes = struct.pack(f"<{len(lengths)}I", *lengths)
        return b"".join((self._head, sizes, *bodies))

    def _kept_body(self, page: Words) -> bytes:
        tokens = page.shape[2]
        if self.cold:
            return self._kept[tokens].encode(page.view(np.uint8).ravel())
        if self.pages and tokens == PAGE:
            raise KvlatheError(
                "a chunk has numbers that no code can hold",
                "they are infinite, or beyond 65,504",
                "ask for cold, which keeps such pages",
            )
        return page.tobytes()

    @cached_property
    def _head(self) -> bytes:
        form = self.form
        flags = int(form.brain) | int(self.cold) << 1
        head_dim = form.head_dim or 0
        return HEAD.pack(MAGIC, VERSION, self.bits, flags, *form.shape, head_dim)

    def decode(self, data: bytes) -> Words:
        """The chunk; with fewer than 16 bits, what its codes stand for. ``data`` may go
        on past it. Raises KvlatheError for data that ``encode`` of this form did not
        write."""
        count = len(self._tokens)
        first = HEAD.size + 4 * count
        if len(data) < first or data[: HEAD.size] != self._head:
            raise _foreign(
                "it has another form, another head_dim, number of bits or version"
            )
        words = struct.unpack_from(f"<{count}I", data, HEAD.size)
        sizes = [word & ~KEPT for word in words]
        if first + sum(sizes) > len(data):
            raise _foreign("it ends early")
        chunk = np.empty(self.form.shape, np.uint16)
        for numbers, word, size in zip(self._split(chunk), words, sizes, strict=True):
            self._decode_page(data[first : first + size], word, numbers)
            first += size
        return chunk

    def _decode_page(self, body: bytes, word: int, numbers: Words) -> None:
        if word & KEPT:
            coder = self._kept[numbers.shape[2]]
            page = coder.decode(body) if self.cold else body
            if len(page) != coder.size:
                raise _foreign("a page has another size")
            numbers[:] = np.frombuffer(page, np.uint16).reshape(numbers.shape)
        elif self.pages and numbers.shape[2] == PAGE:
            self.pages.decode(body, numbers)
        else:
            raise _foreign("a page of codes is where none can be")

    def _split(self, chunk: Words) -> Iterator[Words]:
        """The tokens of each page, as views."""
        for first in range(0, self.form.tokens, PAGE):
            yield chunk[:, :, first : first + PAGE]

    def _coder(self, tokens: int) -> Coder:
        """A coder of pages that keep their numbers. A column is a channel."""
        form = self.form
        row = 2 * form.hidden
        parts: list[Part] = []
        for side in range(form.sides):
            firsts = [
                (side * form.layers + i) * tokens * row for i in range(form.layers)
            ]
            found = tuple(Matrix(at, form.hidden, row, 2) for at in firsts)
            parts.append(Part(tokens, 2, int(form.brain), found))
        return Coder(self._library, parts, form.sides * form.layers * tokens * row)


def _tier(bits: int) -> Tier:
    """K along the tokens, where a channel's numbers are alike, and V along the channels
    (KIVI, arXiv 2402.02750)."""
    found: dict[int, Bits] = {8: 8, 4: 4, 3: 3, 2: 2}
    return Tier(found[bits], found[bits], "token", "rank", SLICE, PAGE)


class _Pages:
    """Pages of codes of one form."""

    def __init__(self, form: ChunkForm, tier: Tier, cold: bool) -> None:
        self.form = form
        self.tier = tier
        self.cold = cold
        self.width = math.gcd(form.hidden, SLICE)
        if self.width % 16:
            raise KvlatheError(
                f"a token has {form.hidden} channels in a layer",
                "codes need a multiple of 16",
                "ask for 16 bits, which lose nothing",
            )
        plan = _plan(form, self.width, tier)
        self._layout = CacheLayout(plan)
        self._hot, self.size = self._layout.page_stride
        library = coding_library()
        self._writer = PageWriter(library, plan)
        self._coder = Coder(library, parts_of(self._layout, 1), self.size)
        self._matrices = matrices(self._layout, 1)[0]
        self._lanes = len(plan.lanes)

    def encode(self, numbers: Words) -> bytes | None:
        """A page's numbers [2, layers, PAGE, hidden]; None where halves cannot hold
        them."""
        halves = numbers.view(np.float16)
        if self.form.brain:
            halves = _widened(numbers).astype(np.float16)
        if not np.isfinite(halves).all():
            return None
        split = halves.reshape(2, self.form.layers, PAGE, -1, self.width)
        hot, page = _aligned(self._hot), _aligned(self.size)
        by_lane = split.transpose(1, 3, 0, 2, 4)
        hot.view(np.float16).reshape(by_lane.shape)[:] = by_lane
        self._writer.seal(0, 1, [(hot, page, [0] * self._lanes)])
        return self._coder.encode(page) if self.cold else page.tobytes()

    def decode(self, body: bytes, numbers: Words) -> None:
        """Fills ``numbers`` with what the codes stand for."""
        data = self._coder.decode(body) if self.cold else body
        if len(data) != self.size:
            raise _foreign("a page has another size")
        page = np.frombuffer(data, np.uint8)
        lanes = page.reshape(self._lanes, -1)
        for side, matrix in enumerate(self._matrices):
            values = _values(lanes, matrix).reshape(
                self.form.layers, -1, *_axes(matrix)
            )
            order = (0, 2, 1, 3) if matrix.format.along_rank else (0, 3, 1, 2)
            values = values.transpose(order).reshape(numbers.shape[1:])
            if self.form.brain:
                numbers[side] = _rounded(values)
            else:
                numbers[side] = values.astype(np.float16).view(np.uint16)


def _aligned(size: int) -> Bytes:
    """Zeros from a multiple of 64 on, as the kernels want pages."""
    room = np.zeros(size + 64, np.uint8)
    first = -room.ctypes.data % 64
    return room[first : first + size]


def _plan(form: ChunkForm, width: int, tier: Tier) -> CompressionPlan:
    """Every slice of ``width`` channels is a head, which keeps all of them."""
    heads = form.hidden // width
    shape = ModelShape(form.layers, heads, heads, width, form.hidden, 1, 1 << 20)
    lanes = tuple(
        Lane(layer, head, width, width, width)
        for layer in range(form.layers)
        for head in range(heads)
    )
    group = Group(tuple(range(len(lanes))), Tier(16, 16), (tier,), SEAL)
    return CompressionPlan(shape, lanes, (group,), page_tokens=PAGE, prefill_chunk=PAGE)


def _axes(matrix: PageMatrix) -> tuple[int, int]:
    """Rows and columns of codes."""
    if matrix.format.along_rank:
        return matrix.tokens, matrix.rank
    return matrix.rank, matrix.tokens


def _values(lanes: Bytes, matrix: PageMatrix) -> npt.NDArray[np.float32]:
    """What the codes of K or V of all lanes stand for, [lanes * rows, columns]. A row is
    one group."""
    form = matrix.format
    rows, columns = _axes(matrix)
    size = form.element_bytes(rows * columns)
    packed = lanes[:, matrix.data : matrix.data + size].reshape(-1, size // rows)
    meta_size = rows * form.group_bytes
    meta = np.ascontiguousarray(lanes[:, matrix.meta : matrix.meta + meta_size])
    halves = meta.view(np.float16).reshape(-1, 2).astype(np.float32)
    values = _codes(packed, form).reshape(len(packed), columns) * halves[:, :1]
    values += halves[:, 1:]
    return values


def _codes(packed: Bytes, form: Format) -> Bytes:
    """The codes of every row; by a table where a byte holds whole ones."""
    if form.runs > 1:
        return unpack(packed, form)
    return byte_codes(form)[0][packed]


def _widened(numbers: Words) -> npt.NDArray[np.float32]:
    """bfloat16 as float32."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: npt.NDArray[np.float32]) -> Words:
    """float32 as bfloat16, to the nearest, of two the even one. No value is NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16).astype(np.uint16)


def _foreign(reason: str) -> KvlatheError:
    return KvlatheError(
        "a chunk cannot be read", reason, "clear the store, or use the serde it is of"
    )
