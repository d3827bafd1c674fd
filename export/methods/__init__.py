"""Methods as data: a request such as "name:key=value+name" becomes a plan and a basis. No other folder names a method.

A method is one file with a SUMMARY and either ``plan``, what it decides where nothing need be calibrated, or
CALIBRATION, the source its paper calibrates on, and ``rotate``, the bases of all lanes that it believes in. Methods
that decide different things compose, in any order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvlathe.errors import KvlatheError
from kvlathe.export.basis import Basis
from kvlathe.export.layout import CacheLayout
from kvlathe.export.methods import auto, fdc, h2o, hack, keyformer, kivi, kvquant, none, snapkv, uncomp, zack, zipcache
from kvlathe.export.methods.buckets import buckets, cold_tier, without
from kvlathe.export.methods.channels import scaled
from kvlathe.export.methods.lowrank import bases, best_ratio, full_lanes, kept, low_rank, within
from kvlathe.export.methods.options import Asked, Options, Part, parse, unknown, with_written
from kvlathe.export.methods.spin import spun
from kvlathe.export.plan import RANK_MULTIPLE, CompressionPlan, ModelShape, Tier
from kvlathe.export.rotation import Rotation, element_change, energy_missed, principal_angle
from kvlathe.export.stats import Stats

__all__ = [
    "METHODS",
    "CacheForm",
    "Evidence",
    "Family",
    "Method",
    "Options",
    "beside",
    "best_ratio",
    "calibration",
    "compose",
    "evidence",
    "families",
    "measured",
    "removed",
    "summaries",
    "verify",
]

Array = npt.NDArray[np.floating]
Source = Literal["random", "text"]

EXACT = 1e-9
"""Shares of the bytes that rounding cannot tell apart."""


@dataclass(frozen=True, slots=True)
class Method:
    """``rotate`` is None for a method that leaves the ranks alone; ``plan`` is then given what is written behind its
    name and the tokens of a page. ``choose`` decides by statistics which tokens are kept; it is also given the seed,
    and ``plan`` then says of its decision what needs no statistics.
    ``source``: what it calibrates on, where that depends on what is written behind its name.
    ``sizes``: the options that say how small it makes the cache, and their values; a search for an accuracy tries those
    that the request leaves open. ``measured``: its plans come from measurements of the model (export/measured.py), not
    from ``compose``.
    """

    summary: str
    calibration: Source | None = None
    rotate: Callable[[Stats, Options], Rotation] | None = None
    plan: Callable[[dict[str, str], int], Part] = none.plan
    choose: Callable[[Stats, dict[str, str], int, int], Part] | None = None
    source: Callable[[dict[str, str]], Source | None] | None = None
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    measured: bool = False


METHODS: dict[str, Method] = {
    "none": Method(none.SUMMARY),
    "fdc": Method(fdc.SUMMARY, fdc.CALIBRATION, fdc.rotate),
    "zack": Method(zack.SUMMARY, zack.CALIBRATION, zack.rotate),
    "hack": Method(hack.SUMMARY, plan=hack.plan, sizes=hack.SIZES),
    "auto": Method(auto.SUMMARY, auto.CALIBRATION, auto.rotate, measured=True),
    "zipcache": Method(zipcache.SUMMARY, plan=zipcache.plan, source=zipcache.source),
    "h2o": Method(h2o.SUMMARY, plan=h2o.plan),
    "snapkv": Method(snapkv.SUMMARY, plan=snapkv.plan),
    "keyformer": Method(keyformer.SUMMARY, plan=keyformer.plan),
    "kivi": Method(kivi.SUMMARY, plan=kivi.plan, sizes=kivi.SIZES),
    "uncomp": Method(uncomp.SUMMARY, uncomp.CALIBRATION, plan=uncomp.outline, choose=uncomp.choose),
    "kvquant": Method(kvquant.SUMMARY, plan=kvquant.plan, sizes=kvquant.SIZES),
}


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The cache's form, which no method decides: bits of a cached number (16 or 32), tokens a page, the prefill grid,
    the seed. ``paired``: kernels read codes of a lane of one width only, K's grouped along the rank, V's along tokens.
    """

    bits: Literal[16, 32] = 16
    page_tokens: int = 64
    prefill_chunk: int = 512
    seed: int = 0
    paired: bool = False


def summaries() -> dict[str, str]:
    """Every method and what it does, in one line each."""
    return {name: method.summary for name, method in METHODS.items()}


def calibration(request: str) -> Source | None:
    """The source of tokens that the request's methods calibrate on by default: text where one of them needs it, None
    where none is needed."""
    asked = _methods(request)
    found = {method.source(one.options) if method.source else method.calibration for one, method in asked}
    return "text" if "text" in found else "random" if "random" in found else None


def measured(request: str) -> bool:
    """Whether the request's plans come from measurements. Raises KvlatheError for a composition of those: they choose
    everything themselves.
    """
    asked = _methods(request)
    found = [one for one, method in asked if method.measured]
    if found and len(asked) > 1:
        names = " and ".join(one.name for one, _ in asked)
        reason = f"{found[0].name} chooses the ranks and the number formats itself"
        raise KvlatheError(f"{names} cannot be composed", reason, f"ask for {found[0].name} alone, or for the others")
    if found and found[0].options:
        raise KvlatheError(f"{request} has options", f"{found[0].name} takes none", "leave them out")
    return bool(found)


def verify(request: str, options: Options, page_tokens: int) -> Part:
    """Raise KvlatheError for all that can be refused without a model: unknown names and options, parts that exclude
    each other, a target that none of them can be asked for. Returns what is known of formats and tokens by then.
    """
    if measured(request):
        return Part()
    asked = _methods(request)
    rotating = [one for one, method in asked if method.rotate]
    _only_one("the ranks", rotating)
    chosen = _chosen([(one, method.plan(one.options, page_tokens)) for one, method in asked if not method.rotate])
    if rotating:
        options = with_written(options, rotating[0].options)
    elif options.removal_rate is not None or options.compression_ratio is not None:
        raise KvlatheError(
            f"{request} cannot remove a given share",
            "none of its methods chooses the ranks",
            "compose it with one that does, or leave the share out",
        )
    if options.compression_ratio is not None and any(rule.kind == "budget" for rule in chosen.tokens):
        raise KvlatheError(
            f"{request} cannot remove a given share",
            "what a budget of tokens removes depends on the sequence's length",
            "say what the ranks remove: --removal-rate",
        )
    return chosen


def compose(
    request: str, shape: ModelShape, rope: bool, stats: Stats | None, options: Options, form: CacheForm
) -> tuple[CompressionPlan, Basis]:
    """The plan and the basis of ``request`` for a model of ``shape``. ``stats`` may be None where calibration() is.

    Raises KvlatheError for unknown names and options, parts that exclude each other, and targets out of reach.
    """
    if measured(request):
        raise KvlatheError(f"{request} cannot be planned from statistics", "it measures the model", "build an engine")
    verify(request, options, form.page_tokens)
    asked = _methods(request)
    rotating = [(one, method) for one, method in asked if method.rotate]
    chosen = _chosen([(one, _decided(one, method, stats, form)) for one, method in asked if not method.rotate])
    if rotating:
        return _ranked(request, shape, *rotating[0], chosen, stats, options, form)
    return _composed(request, shape, Part(full_lanes(shape, rope)), chosen, stats, form)


def _decided(asked: Asked, method: Method, stats: Stats | None, form: CacheForm) -> Part:
    """What one method decides that leaves the ranks alone."""
    if method.choose is None:
        return method.plan(asked.options, form.page_tokens)
    return method.choose(_statistics(asked.name, stats), asked.options, form.page_tokens, form.seed)


def _statistics(what: str, stats: Stats | None) -> Stats:
    if stats is None:
        raise KvlatheError(f"{what} needs statistics", "it decides by them", "calibrate first")
    return stats


def _chosen(parts: list[tuple[Asked, Part]]) -> Part:
    """Number format and token rules, each by at most one of the parts."""
    sealing = [(one, part) for one, part in parts if part.cold or part.split]
    ruling = [(one, part) for one, part in parts if part.tokens or part.split]
    _only_one("the number format of full pages", [one for one, _ in sealing])
    _only_one("which tokens are kept", [one for one, _ in ruling])
    found = ruling[0][1] if ruling else Part()
    if not sealing:
        return found
    formats = sealing[0][1]
    if formats.split:
        return formats
    notes = found.notes | formats.notes
    found = dataclasses.replace(found, cold=formats.cold, spin=formats.spin, scales=formats.scales, notes=notes)
    return dataclasses.replace(found, cold=cold_tier(found))


def _ranked(
    request: str,
    shape: ModelShape,
    asked: Asked,
    method: Method,
    chosen: Part,
    stats: Stats | None,
    options: Options,
    form: CacheForm,
) -> tuple[CompressionPlan, Basis]:
    """The composition where one method chooses ranks. A share of the bytes is asked of all methods together."""
    options, rotate, stats = with_written(options, asked.options), method.rotate, _statistics(asked.name, stats)
    assert rotate

    def at(ratio: float | None) -> tuple[CompressionPlan, Basis]:
        ranks = low_rank(stats, options if ratio is None else options.asked(compression_ratio=ratio), rotate)
        return _composed(request, shape, ranks, chosen, stats, form)

    if options.compression_ratio is None or (chosen.cold is None and not chosen.split):
        return at(None)
    return within(options.compression_ratio, shape, form.bits, at)


def _only_one(what: str, asked: list[Asked]) -> None:
    if len(asked) > 1:
        names = " and ".join(one.name for one in asked)
        raise KvlatheError(f"{names} cannot be composed", f"each of them chooses {what}", "keep one of them")


def _methods(request: str) -> list[tuple[Asked, Method]]:
    asked = parse(request)
    for one in asked:
        if one.name not in METHODS:
            raise unknown(f"the compression {one.name!r}", one.name, METHODS)
    return [(one, METHODS[one.name]) for one in asked]


def _composed(
    request: str, shape: ModelShape, ranks: Part, chosen: Part, stats: Stats | None, form: CacheForm
) -> tuple[CompressionPlan, Basis]:
    """Fresh tokens in the cache's own format; full pages, tokens and stages as ``chosen``."""
    assert ranks.lanes is not None
    lanes, basis, tiers = without(ranks.lanes, chosen.removed), ranks.basis, [Tier(form.bits, form.bits)]
    tiers += [tier for tier, _ in chosen.split]
    if chosen.cold is not None:
        lanes, basis = spun(lanes, basis, shape.head_dim, chosen.cold, chosen.spin, form.seed)
        tiers.append(chosen.cold)
    if chosen.scales:
        basis = scaled(lanes, basis, _statistics(request, stats), chosen.scales)
    plan = CompressionPlan(
        model=shape,
        lanes=lanes,
        tiers=tuple(tiers),
        buckets=buckets(lanes, chosen),
        page_tokens=form.page_tokens,
        prefill_chunk=form.prefill_chunk,
        seed=form.seed,
        probe=chosen.probe,
        stages=chosen.stages,
        compression=request,
        notes=ranks.notes | chosen.notes,
    )
    return plan, basis


# -- what a search may choose from ------------------------------------------------------------------------------------
Made = tuple[CompressionPlan, Basis]


@dataclass(frozen=True, slots=True)
class Family:
    """Plans of one request by the share of the bytes that they remove, from ``least`` to ``most`` (equal where it is
    one plan); shares are of the uncompressed cache in the form's bits. ``name``: the request, all written; ``of``: as
    it was asked, which is what families of one request have in common.
    """

    name: str
    of: str
    bits: int
    least: float
    most: float
    plan: Callable[[float], Made]

    def at(self, ratio: float) -> Made:
        """The plan that removes at least ``ratio`` of the bytes. Raises KvlatheError where none does."""
        if ratio > self.most:
            raise KvlatheError(
                f"a compression ratio of {ratio:g} cannot be reached",
                "every head keeps its smallest form",
                f"ask for at most {int(1e4 * self.most) / 1e4:.4g}",
            )
        return self.plan(ratio)


def removed(plan: CompressionPlan, bits: int) -> float:
    """Share of the bytes that ``plan`` removes of the uncompressed cache in ``bits`` a number, a long sequence."""
    whole = 2 * len(plan.lanes) * plan.model.head_dim * bits / 8
    return 1 - CacheLayout(plan).bytes_per_token() / whole


def beside(shape: ModelShape, rope: bool, stats: Stats | None, form: CacheForm) -> list[Family]:
    """What measured plans are shown beside: every method that chooses ranks or a number format for all tokens. One that
    this form cannot hold is left out.
    """
    found: list[Family] = []
    for name, method in METHODS.items():
        if not method.measured and (method.sizes or method.rotate):
            with contextlib.suppress(KvlatheError):
                found += families(name, shape, rope, stats, Options(), form)
    return found


def families(
    request: str, shape: ModelShape, rope: bool, stats: Stats | None, options: Options, form: CacheForm
) -> list[Family]:
    """Everything that ``request`` leaves open. Raises KvlatheError for what ``compose`` refuses."""
    ranked = any(method.rotate for _, method in _methods(request))

    def family(name: str) -> Family:
        def at(ratio: float) -> Made:
            asked = options.asked(compression_ratio=ratio if ranked else None)
            return compose(name, shape, rope, stats, asked, form)

        whole = at(0.0)[0]
        least = removed(whole, form.bits)
        most = removed(_smallest(whole), form.bits) - EXACT if ranked else least
        return Family(name, request, form.bits, least, most, at)

    return [family(name) for name in _variants(request)]


def _smallest(plan: CompressionPlan) -> CompressionPlan:
    """``plan`` with every lane cut to the least rank."""
    lanes = (dataclasses.replace(x, rank_k=RANK_MULTIPLE, rank_v=RANK_MULTIPLE, projected=True) for x in plan.lanes)
    return dataclasses.replace(plan, lanes=tuple(lanes))


def _variants(request: str) -> list[str]:
    """``request`` with every value of every size that it leaves open."""
    parts = [_written_out(text.strip()) for text in request.split("+")]
    return ["+".join(choice) for choice in itertools.product(*parts)]


def _written_out(text: str) -> list[str]:
    """One method of a request, each way its open sizes may be written."""
    ((asked, method),), found = _methods(text), [text]
    for key, values in method.sizes.items():
        if not any(name.startswith(key) for name in asked.options):
            found = [f"{start}{',' if ':' in start else ':'}{key}={value}" for start in found for value in values]
    return found


# -- what a person should see ------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Evidence:
    """Spectra [L, H, d] and the stability of the bases between the two halves of the calibration, [L, H] each.

    ``epsilon`` = mean |R|, ``delta`` = mean |R_a - R_b| aligned, ``angle`` = largest principal angle of the kept
    spaces, radians, ``missed`` = fraction of the energy of one half's keys (values) that the other half's kept space
    does not hold and its own does.
    """

    spectrum_k: Array
    spectrum_v: Array
    epsilon_k: Array
    delta_k: Array
    angle_k: Array
    missed_k: Array
    epsilon_v: Array
    delta_v: Array
    angle_v: Array
    missed_v: Array


def evidence(request: str, stats: Stats, options: Options, plan: CompressionPlan) -> Evidence | None:
    """Why the plan's bases should be believed; None where no method of the request made any."""
    found = [(m.rotate, with_written(options, asked.options)) for asked, m in _methods(request) if m.rotate]
    if not found:
        return None
    rotate, options = found[0]
    second = stats.half(1)
    seen = second.whole
    whole, one, other = (bases(s, options, rotate) for s in (stats, stats.half(0), second))
    sides = {}
    for side, left, right, moment in (("k", one.b, other.b, seen.kk), ("v", one.a_v, other.a_v, seen.vv)):
        pairs = list(zip(kept(plan.lanes, left, side), kept(plan.lanes, right, side), strict=True))
        angles = np.array([principal_angle(x, y) for x, y in pairs])
        moments = moment.reshape(-1, *moment.shape[2:])
        missed = [energy_missed(*pair, m) for pair, m in zip(pairs, moments, strict=True)]
        epsilon, delta = element_change(left, right)
        shape = epsilon.shape
        sides |= {f"epsilon_{side}": epsilon, f"delta_{side}": delta}
        sides |= {f"angle_{side}": angles.reshape(shape), f"missed_{side}": np.reshape(missed, shape)}
    return Evidence(whole.spectrum_k, whole.spectrum_v, **sides)
