"""Whether a parcel is a page table of this plan: what is wrong with one is said before
any page is taken."""

from __future__ import annotations

import base64
from collections.abc import Sequence as Items
from operator import add

from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.cache.parcel import Base, Parcel, damaged
from kvlathe.runtime.sessions.protocols import PLAIN


def check_buckets(layout: CacheLayout, parcel: Parcel) -> None:
    """Whether it speaks of the layout's buckets. Raises KvlatheError."""
    buckets = len(layout.page_stride)
    listed = parcel.listed
    per_bucket = (
        parcel.ids,
        parcel.lengths,
        parcel.arrived,
        parcel.rows,
        listed.sizes,
        listed.digests,
    )
    if {len(x) for x in per_bucket} != {buckets}:
        raise damaged(f"it does not speak of {buckets} buckets")


def check_parcel(layout: CacheLayout, parcel: Parcel, cuts: Items[int]) -> None:
    """``cuts``: tokens of each bucket that came as rows; its buckets were checked.
    Raises KvlatheError."""
    coding = parcel.listed.coding
    if coding != PLAIN:
        raise damaged(f"its pages are coded ({coding})")
    known = len(parcel.tokens)  # malformed ones are refused here
    if parcel.cached > known:
        raise damaged(f"it has {parcel.cached} cached tokens of {known}")
    if max(*parcel.lengths, *parcel.arrived) > parcel.cached:
        raise damaged("a bucket holds more tokens than are cached")
    _check_counts(layout, parcel, cuts)
    size = parcel.state.size if parcel.state is not None else 0
    if size != layout.plan.model.state_bytes:
        raise damaged(f"its state has {size:,} bytes")
    if parcel.base is not None:
        _check_base(layout, parcel.base, parcel)
    if parcel.running is None:
        _check_prefix(layout, parcel, known)
    else:
        _check_running(layout, parcel)


def _check_counts(layout: CacheLayout, parcel: Parcel, cuts: Items[int]) -> None:
    listed = parcel.listed
    for b, count in enumerate(layout.pages_of(parcel.lengths, parcel.arrived)):
        full = count - bool(cuts[b])
        if {len(parcel.ids[b]), len(listed.sizes[b]), len(listed.digests[b])} != {full}:
            raise damaged(f"bucket {b} does not have {full} pages")
        if set(listed.sizes[b]) - {layout.page_stride[b]}:
            raise damaged(f"a page of bucket {b} has another size")


def _check_prefix(layout: CacheLayout, parcel: Parcel, known: int) -> None:
    """Every token of a prefix is cached, and held as one that has just ended."""
    cached, own = _before(layout, parcel)
    expected = list(map(add, layout.all_held(parcel.cached - cached), own))
    buckets = layout.plan.index.buckets
    arrived = [parcel.cached if bucket.is_hot else 0 for bucket in buckets]
    is_held = list(parcel.lengths) == expected and list(parcel.arrived) == arrived
    if not is_held or known != parcel.cached:
        raise damaged(f"no prefix of {parcel.cached} tokens is held like this")


def _check_running(layout: CacheLayout, parcel: Parcel) -> None:
    """Check that all that arrived in a hot bucket is there or in its cold ones, but for
    what lives drop or divide."""
    cached, own = _before(layout, parcel)
    held = [now - before for now, before in zip(parcel.lengths, own, strict=True)]
    buckets = layout.plan.index.buckets
    for bucket in buckets:
        arrived = parcel.arrived[bucket.hot]
        if arrived != parcel.cached and not layout.plan.stages:
            raise damaged(f"bucket {bucket.hot} does not have what is cached")
        stays_whole = bucket.stays and not bucket.life.drops and bucket.life.seals
        there = held[bucket.hot]
        for cold in buckets[bucket.hot].cold:
            if buckets[cold].lanes == bucket.lanes:
                there += held[cold]
        if stays_whole and there != arrived - cached:
            raise damaged(f"bucket {bucket.number} does not hold what has arrived")


def _before(layout: CacheLayout, parcel: Parcel) -> tuple[int, Items[int]]:
    """Tokens of the compacted prefix, and what each bucket holds of them."""
    base = parcel.base
    if base is None:
        return 0, [0] * len(layout.page_stride)
    return base.cached, base.lengths


def _check_base(layout: CacheLayout, base: Base, parcel: Parcel) -> None:
    """A compacted prefix has whole pages of its own."""
    page = layout.plan.page_tokens
    expected = [length // page for length in base.lengths]
    lengths = zip(base.lengths, parcel.lengths, strict=False)
    fits = all(own <= whole for own, whole in lengths)
    fits &= not any(length % page for length in base.lengths)
    fits &= list(base.pages) == expected
    if len(base.lengths) != len(parcel.ids) or not fits:
        raise damaged("its compacted prefix does not have the pages that it says")
    if layout.plan.index.compaction is None or base.cached > parcel.cached:
        raise damaged("its compacted prefix is none of this plan, or longer than it")


def rows_of(parcel: Parcel, bucket: int) -> bytes:
    """The rows of a bucket's last page. Raises KvlatheError."""
    try:
        return base64.b64decode(parcel.rows[bucket], validate=True)
    except ValueError as error:
        raise damaged(f"its rows are malformed ({error})") from error
