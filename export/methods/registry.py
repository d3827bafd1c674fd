"""The registry: every method under its name, and what a method is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases.rotation import Rotation
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods import (
    auto,
    duo,
    fdc,
    fp8,
    h2o,
    hack,
    keyformer,
    kivi,
    kvquant,
    kvzip,
    none,
    snapkv,
    turboquant,
    uncomp,
    window,
    zack,
    zipcache,
)
from kvlathe.export.methods.options import (
    Decision,
    Options,
    RequestedMethod,
    parse,
    unknown,
)
from kvlathe.plan.heads import ModelShape

Source = Literal["random", "text"]
Written = dict[str, str]
"""The options behind a method's name, as they were written."""

Rotate = Callable[[Stats, Options], Rotation]
"""The bases of all lanes that a method which chooses ranks believes in."""
Plan = Callable[[Written, int], Decision]
"""(options, tokens of a page) -> what is decided without statistics."""
Choose = Callable[[Stats, Written, int, int], Decision]
"""(statistics, options, tokens of a page, seed) -> what is decided by statistics."""
Check = Callable[[Written, ModelShape], None]
"""Raises KvlatheError for options that no model of this shape can have."""
NameHeads = Callable[[Written, Sequence[float], int], str]
"""(options, what the window costs each lane, KV heads of a layer) -> a request that
names the heads which see everything."""


@dataclass(frozen=True, slots=True)
class Method:
    """``rotate`` for a method that chooses ranks, else ``plan``, and beside it
    ``choose`` where statistics decide which tokens are kept: ``plan`` then says what is
    known without them. ``check`` refuses options before anything is calibrated.
    ``name_heads`` where measured losses decide which heads see everything.

    ``calibration``: what it calibrates on; ``source`` says it where that depends on its
    options. ``sizes``: the options that say how small it makes the cache, and their
    values; a search tries those that a request leaves open. ``measured``: its plans
    come from measurements of the model (export/search/measured.py). ``entropies``:
    whether it reads those of a calibration.
    """

    summary: str
    calibration: Source | None = None
    rotate: Rotate | None = None
    plan: Plan = none.plan
    choose: Choose | None = None
    check: Check | None = None
    name_heads: NameHeads | None = None
    source: Callable[[Written], Source | None] | None = None
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    measured: bool = False
    entropies: bool = False


METHODS: dict[str, Method] = {
    "none": Method(none.SUMMARY),
    "fdc": Method(fdc.SUMMARY, fdc.CALIBRATION, fdc.rotate),
    "zack": Method(zack.SUMMARY, zack.CALIBRATION, zack.rotate),
    "hack": Method(hack.SUMMARY, plan=hack.plan, sizes=hack.SIZES),
    "fp8": Method(fp8.SUMMARY, plan=fp8.plan),
    "auto": Method(auto.SUMMARY, auto.CALIBRATION, auto.rotate, measured=True),
    "zipcache": Method(zipcache.SUMMARY, plan=zipcache.plan, source=zipcache.source),
    "h2o": Method(h2o.SUMMARY, plan=h2o.plan),
    "snapkv": Method(snapkv.SUMMARY, plan=snapkv.plan),
    "keyformer": Method(keyformer.SUMMARY, plan=keyformer.plan),
    "kivi": Method(kivi.SUMMARY, plan=kivi.plan, sizes=kivi.SIZES),
    "uncomp": Method(
        uncomp.SUMMARY,
        uncomp.CALIBRATION,
        plan=uncomp.outline,
        choose=uncomp.choose,
        check=uncomp.check,
        entropies=True,
    ),
    "window": Method(window.SUMMARY, plan=window.plan, check=window.check),
    "duo": Method(duo.SUMMARY, plan=duo.plan, name_heads=duo.named),
    "kvquant": Method(kvquant.SUMMARY, plan=kvquant.plan, sizes=kvquant.SIZES),
    "kvzip": Method(kvzip.SUMMARY, plan=kvzip.plan),
    "turboquant": Method(
        turboquant.SUMMARY, plan=turboquant.plan, sizes=turboquant.SIZES
    ),
}


def summaries() -> dict[str, str]:
    """Every method and what it does, in one line each."""
    return {name: method.summary for name, method in METHODS.items()}


def methods_of(request: str) -> list[tuple[RequestedMethod, Method]]:
    """The methods that a request names. Raises KvlatheError for unknown names."""
    requested = parse(request)
    for one in requested:
        if one.name not in METHODS:
            raise unknown(f"the compression {one.name!r}", one.name, METHODS)
    return [(one, METHODS[one.name]) for one in requested]


def chooses_ranks(request: str) -> bool:
    """Whether one of the request's methods decides how many dimensions are kept."""
    methods = methods_of(request)
    return any(method.rotate for _, method in methods)


def calibration(request: str) -> Source | None:
    """What the request's methods calibrate on by default: text where one of them needs
    it, None where none calibrates."""
    sources = {
        method.source(one.options) if method.source else method.calibration
        for one, method in methods_of(request)
    }
    if "text" in sources:
        return "text"
    return "random" if "random" in sources else None


def reads_entropies(request: str) -> bool:
    """Whether one of the request's methods reads a calibration's entropies."""
    methods = methods_of(request)
    return any(method.entropies for _, method in methods)


def measured(request: str) -> bool:
    """Whether the request's plans come from measurements. Raises KvlatheError for a
    composition of those: they choose everything themselves.
    """
    requested = methods_of(request)
    alone = [one for one, method in requested if method.measured]
    if not alone:
        return False
    name = alone[0].name
    if len(requested) > 1:
        names = " and ".join(one.name for one, _ in requested)
        raise KvlatheError(
            f"{names} cannot be composed",
            f"{name} chooses the ranks and the number formats itself",
            f"ask for {name} alone, or for the others",
        )
    if alone[0].options:
        raise KvlatheError(
            f"{request} has options", f"{name} takes none", "leave them out"
        )
    return True


def measures_heads(request: str) -> bool:
    """Whether measured losses decide which heads of the request see everything."""
    methods = methods_of(request)
    return any(method.name_heads for _, method in methods)


def with_heads(request: str, losses: Sequence[float], heads: int) -> str:
    """The request with those heads named, by what the window costs each lane: [layers *
    ``heads``]."""
    texts = []
    for text in request.split("+"):
        ((one, method),) = methods_of(text)
        if method.name_heads is not None:
            text = method.name_heads(one.options, losses, heads)
        texts.append(text)
    return "+".join(texts)


def check_model(request: str, shape: ModelShape) -> None:
    """Raise KvlatheError for options that no model of this ``shape`` can have. It needs
    no statistics: ask before calibrating."""
    for one, method in methods_of(request):
        if method.check is not None:
            method.check(one.options, shape)
