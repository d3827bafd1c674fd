"""Parcels: pages outside their pool. A description, small and JSON, and their bytes.

    packed   mark | length of the description | its digest | description | page | page | ... | state

Bytes go packed, to a file or a socket, or by themselves from pool to pool: the
description has the page ids that they left, and ``requests/exchange.py`` the addresses.
Every page has a digest (kvlathe/plan/page_digest.py), so what was damaged on its way is
refused. Full pages travel whole. Of a page that is filled in part, the rows of its
tokens are in the description (hot_rows.py), unless it goes by address: then it goes whole.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.plan import json_fields
from kvlathe.plan.json_fields import Count, Positive, PositiveFloat, Sha256
from kvlathe.plan.manifest import BASIS_FILE, Manifest
from kvlathe.plan.page_digest import page_digest
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.sessions.protocols import PLAIN

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = TypeVar("Kind")
FORM = 3
"""The version of pages and their digests: rises where their bytes, or those around
them, change."""
NAME = b"kvlathe pages "
MARK = NAME + f"{FORM}\n".encode()
HEAD = struct.Struct(f"<{len(MARK)}sI32s")
MOST_SAID = 1 << 26
"""Bytes of a description: a larger one is none of ours."""
BytesLike = bytes | memoryview
Nested = Mapping[str, Mapping[str, Mapping[str, object]]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose pages: ``plan`` is the digest of the plan, ``weights`` one of the
    checkpoint and of the bases that keys and values are projected to. ``form``: FORM of
    whoever describes them."""

    plan: Sha256
    weights: Sha256
    form: Positive

    @classmethod
    def of(cls, plan: CompressionPlan, manifest: Manifest | None) -> Origin:
        """The origin of an engine; without a manifest nothing is known of its
        weights."""
        said = ""
        if manifest is not None:
            basis = manifest.files.get(BASIS_FILE)
            said = manifest.model_digest
            said += basis.sha256 if basis else ""
        return cls(plan.digest, hashlib.sha256(said.encode()).hexdigest(), FORM)

    def check(self, theirs: Origin) -> None:
        """Raises KvlatheError for pages of another plan, or of other weights."""
        remedy = "send them to an engine of the same build"
        if theirs.plan != self.plan:
            reason = (
                f"their plan is {theirs.plan:.12}, this engine's is {self.plan:.12}"
            )
            raise KvlatheError("pages of another plan were sent", reason, remedy)
        if theirs.weights != self.weights:
            reason = (
                f"theirs are {theirs.weights:.12}, this engine's {self.weights:.12}"
            )
            raise KvlatheError("pages of other weights were sent", reason, remedy)


@dataclass(frozen=True, slots=True)
class PageList:
    """Pages of each bucket: the ``sizes`` of their bytes, and a digest of each.
    ``coding``: what the bytes are, pages or what a PageCodec made of them."""

    origin: Origin
    sizes: tuple[tuple[Count, ...], ...]
    digests: tuple[tuple[Sha256, ...], ...]
    coding: str = PLAIN

    @classmethod
    def of(
        cls, origin: Origin, pages: Sequence[Sequence[BytesLike]], coding: str = PLAIN
    ) -> PageList:
        sizes: list[tuple[int, ...]] = []
        digests: list[tuple[str, ...]] = []
        for of_bucket in pages:
            sizes.append(tuple(map(len, of_bucket)))
            digests.append(tuple(map(page_digest, of_bucket)))
        return cls(origin, tuple(sizes), tuple(digests), coding)

    def check(self, bucket: int, place: int, digest: str) -> None:
        """Raises KvlatheError where a page with this digest is not what was listed."""
        if digest != self.digests[bucket][place]:
            name = f"page {place} of bucket {bucket}"
            raise damaged(f"{name} does not have its digest")

    def split(self, body: memoryview) -> list[list[memoryview]]:
        """The pages in ``body``, end to end, checked. Raises KvlatheError."""
        wanted = sum(map(sum, self.sizes))
        if wanted != len(body):
            raise damaged(f"it has {len(body):,} bytes of {wanted:,}")
        found: list[list[memoryview]] = []
        at = 0
        for bucket, sizes in enumerate(self.sizes):
            of_bucket: list[memoryview] = []
            for place, size in enumerate(sizes):
                page = body[at : at + size]
                self.check(bucket, place, page_digest(page))
                of_bucket.append(page)
                at += size
            found.append(of_bucket)
        return found


@dataclass(frozen=True, slots=True)
class Base:
    """The compacted prefix that a table begins with (page_table.CompactedPrefix):
    ``cached`` tokens, of whose KV pairs the ``share`` was kept. The first ``pages`` of
    each bucket are its own."""

    cached: Positive
    share: PositiveFloat
    lengths: tuple[Count, ...]
    pages: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The state that layers keep of a sequence, float32 little-endian: its ``size`` in
    bytes, and a digest as a page's."""

    size: Positive
    digest: Sha256

    @classmethod
    def of(cls, state: bytes) -> StateBytes:
        return cls(len(state), page_digest(state))


@dataclass(frozen=True, slots=True)
class Running:
    """The state of a sequence beside its cache: how long its prompt is, its parameters
    (JSON), its sampler's seed and how many tokens it drew, and the log-probabilities it
    has reported so far (JSON): of its answer, of its prompt."""

    prompt_tokens: Positive
    params: str
    seed: Count
    drawn: Count
    logprobs: str
    prompt_logprobs: str


@dataclass(frozen=True, slots=True)
class Parcel:
    """A description. ``listed``: its whole pages, which have the page ids ``ids`` in
    the pool that they left. ``history``: the token ids, base64 of little-endian int32,
    of which the first ``cached`` have K and V there. ``lengths``, ``arrived``: of its
    page table, by bucket. ``rows``: of each bucket the bytes of a last page that is
    filled in part and is not among the whole ones, base64; else empty.

    ``state``: where layers keep one. ``running``: of a sequence; None: a prefix.
    """

    listed: PageList
    ids: tuple[tuple[Count, ...], ...]
    history: str
    cached: Positive
    lengths: tuple[Count, ...]
    arrived: tuple[Count, ...]
    rows: tuple[str, ...]
    base: Base | None = None
    running: Running | None = None
    state: StateBytes | None = None

    @property
    def tokens(self) -> list[int]:
        """The token ids. Raises KvlatheError for what are none."""
        try:
            data = base64.b64decode(self.history, validate=True)
            return np.frombuffer(data, "<i4").tolist()
        except ValueError as error:
            raise damaged(f"its tokens are malformed ({error})") from error

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages; all else but a state is in the description."""
        return sum(map(sum, self.listed.sizes))

    def split(self, body: memoryview) -> tuple[list[list[memoryview]], bytes]:
        """The pages and the state in the bytes behind a packed description, checked; an
        empty state where none is kept. Raises KvlatheError."""
        end = self.page_bytes
        state = bytes(body[end:])
        wanted = 0 if self.state is None else self.state.size
        if len(state) != wanted:
            raise damaged(f"its state has {len(state):,} bytes of {wanted:,}")
        if self.state is not None and page_digest(state) != self.state.digest:
            raise damaged("its state does not have its digest")
        return self.listed.split(body[:end]), state

    def to_json(self) -> str:
        return said(self)

    @classmethod
    def from_json(cls, text: str) -> Parcel:
        """Raises KvlatheError for what is no parcel."""
        return heard(cls, text)


def history_of(tokens: Sequence[int]) -> str:
    """As Parcel.history."""
    return base64.b64encode(np.asarray(tokens, "<i4").tobytes()).decode()


def said(value: DataclassInstance) -> str:
    """A dataclass as JSON."""
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"))


def heard(kind: type[Kind], text: str) -> Kind:
    """Read the ``kind`` that ``said`` wrote, which lists pages. Raises KvlatheError."""
    try:
        fields = json_fields.parse(text)
        form = cast(Nested, fields)["listed"]["origin"].get("form", "unknown")
        if form != FORM:
            raise _of_another_version(form)
        return json_fields.read(kind, fields, "it")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(f"its description is malformed ({error})") from error


def pack(text: str, pages: Sequence[Sequence[BytesLike]]) -> list[BytesLike]:
    """A description and its pages, as pieces that together are packed."""
    body = text.encode()
    digest = hashlib.sha256(body).digest()
    pieces: list[BytesLike] = [HEAD.pack(MARK, len(body), digest), body]
    for of_bucket in pages:
        pieces += of_bucket
    return pieces


def unpack(data: BytesLike) -> tuple[str, memoryview]:
    """The description, and the bytes behind it. Raises KvlatheError for what is cut
    short, damaged, or no parcel."""
    view = memoryview(data)
    if len(view) < HEAD.size:
        raise damaged("it ends early")
    mark, length, digest = HEAD.unpack_from(view)
    if mark != MARK and mark.startswith(NAME):
        raise _of_another_version(
            mark.removeprefix(NAME).decode(errors="replace").strip()
        )
    if mark != MARK:
        raise damaged("it does not begin as ours do")
    end = HEAD.size + length
    body = bytes(view[HEAD.size : end])
    if length > MOST_SAID or len(body) != length:
        raise damaged("it ends early")
    if hashlib.sha256(body).digest() != digest:
        raise damaged("its description does not have its digest")
    try:
        return body.decode(), view[end:]
    except UnicodeDecodeError as error:
        raise damaged("its description is no text") from error


def _of_another_version(form: object) -> KvlatheError:
    return KvlatheError(
        "a parcel of another version of kvlathe was sent",
        f"its pages have form {form}, this version reads form {FORM}",
        "run the same version on both sides",
    )


def damaged(reason: str) -> KvlatheError:
    return KvlatheError(
        "a parcel of pages cannot be read", reason, "send it again, or compute it here"
    )
