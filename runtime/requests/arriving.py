"""Whether a parcel is a page table of this plan: what is wrong with one is said before
any page is taken."""

from __future__ import annotations

import base64
from collections.abc import Sequence as Items

from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.cache.hot_rows import pages_of
from kvlathe.runtime.cache.parcel import PLAIN, Base, Parcel, damaged


def check_parcel(layout: CacheLayout, parcel: Parcel, cuts: Items[int]) -> None:
    """``cuts``: tokens of each bucket that came as rows. Raises KvlatheError."""
    buckets = len(layout.page_stride)
    listed = parcel.listed
    if listed.coding != PLAIN:
        raise damaged(f"its pages are coded ({listed.coding})")
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
    known = len(parcel.tokens)  # malformed ones are refused here
    if parcel.cached > known:
        raise damaged(f"it has {parcel.cached} cached tokens of {known}")
    if max(*parcel.lengths, *parcel.arrived) > parcel.cached:
        raise damaged("a bucket holds more tokens than are cached")
    _check_counts(layout, parcel, cuts)
    if parcel.base is not None:
        _check_base(parcel.base, parcel)
    elif parcel.running is None:
        _check_prefix(layout, parcel)


def _check_counts(layout: CacheLayout, parcel: Parcel, cuts: Items[int]) -> None:
    listed = parcel.listed
    counts = pages_of(parcel.lengths, layout.plan.page_tokens)
    for b, (count, cut) in enumerate(zip(counts, cuts, strict=True)):
        full = count - bool(cut)
        said = {len(parcel.ids[b]), len(listed.sizes[b]), len(listed.digests[b])}
        if said != {full}:
            raise damaged(f"bucket {b} does not have {full} pages")
        if set(listed.sizes[b]) - {layout.page_stride[b]}:
            raise damaged(f"a page of bucket {b} has another size")


def _check_prefix(layout: CacheLayout, parcel: Parcel) -> None:
    if list(parcel.lengths) != layout.all_held(parcel.cached):
        raise damaged(f"no prefix of {parcel.cached} tokens is held like this")


def _check_base(base: Base, parcel: Parcel) -> None:
    pages = zip(base.pages, parcel.ids, strict=False)
    lengths = zip(base.lengths, parcel.lengths, strict=False)
    fits = all(count <= len(ids) for count, ids in pages)
    fits &= all(own <= whole for own, whole in lengths)
    same = len(base.pages) == len(base.lengths) == len(parcel.ids)
    if not (fits and same) or base.cached > parcel.cached:
        raise damaged("its compacted prefix is larger than itself")


def rows_of(parcel: Parcel, bucket: int) -> bytes:
    """The rows of a bucket's last page. Raises KvlatheError."""
    try:
        return base64.b64decode(parcel.rows[bucket], validate=True)
    except ValueError as error:
        raise damaged(f"its rows are malformed ({error})") from error
