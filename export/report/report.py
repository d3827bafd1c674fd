"""report.html: what was built, what it saves and what it costs, on one self-contained
page.

The page needs no network and no other file; it follows the reader's light or dark
setting and prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from markupsafe import Markup

from kvlathe.base.console import cell, human_bytes
from kvlathe.base.pages import STYLE
from kvlathe.export.methods.evidence import Evidence
from kvlathe.export.report import charts
from kvlathe.export.report.curve import Sizes, accuracy_curve, lost_below
from kvlathe.export.report.heading import Heading, heading
from kvlathe.export.report.heads import Kept, Map, heat_map, kept
from kvlathe.export.report.page_rows import page_pictures
from kvlathe.export.report.sizes import NAMES, bars
from kvlathe.export.report.stability import Stability, stability
from kvlathe.export.report.words import WORDS, anchor, linked
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.measurement import UNMEASURED, Measurement, bounded
from kvlathe.plan.plan import CompressionPlan

TEMPLATE = Path(__file__).with_name("report.html.j2")
OWN_STYLE = Path(__file__).with_name("report.css")


@dataclass(frozen=True)
class ReportData:
    """Everything the page shows. Byte counts are of one token, all padding and metadata
    counted.

    ``bytes_baseline`` is the uncompressed cache in the engine's own number format,
    ``bytes_16bit`` the uncompressed cache in 16 bit. ``evidence``: spectra and
    stability, None for a plan made without calibration. ``loss``: what the build
    measured, None where it did not. ``longest``: tokens of the longest sequence that the
    engine takes, None where the model alone says. ``memory``: rows of ``memory_table``.
    ``facts``, ``limits`` and ``versions`` are shown as they are. ``engine``,
    ``checkpoint``: the folders that commands on the page name.
    """

    model: str
    command: str
    created: str
    plan: CompressionPlan
    bytes_per_token: float
    bytes_baseline: float
    bytes_16bit: float
    evidence: Evidence | None = None
    loss: Measurement | None = None
    longest: int | None = None
    memory: Sequence[Mapping[str, int]] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    limits: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    engine: Path = Path("ENGINE")
    checkpoint: Path = Path("MODEL")


def write_report(path: Path, data: ReportData) -> None:
    """Write the page to ``path``."""
    path.write_text(render(data), encoding="utf-8")


def render(data: ReportData) -> str:
    """The page as HTML. Values are escaped; only the charts, which we draw ourselves,
    enter as markup."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(cell=cell, human_bytes=human_bytes, loss=_loss)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    plan = data.plan
    longest = data.longest or plan.model.max_positions
    held = kept(plan, longest)
    layout = CacheLayout(plan)
    checked = data.evidence and stability(data.evidence, held, held.dims)
    uncompressed = _uncompressed(data)
    maps = _maps(plan, held)
    return template.render(
        data=data,
        style=Markup(STYLE + OWN_STYLE.read_text(encoding="utf-8")),
        heading=heading(
            Heading(
                data.model,
                plan.compression,
                data.command,
                data.created,
                data.engine,
                data.checkpoint,
            )
        ),
        plan=plan,
        loss=data.loss,
        unmeasured=UNMEASURED,
        word=linked,
        words={anchor(word): (word, said) for word, said in WORDS.items()},
        kept=held,
        bars=bars(layout, longest, uncompressed),
        kinds=NAMES,
        charts=_charts(data, checked),
        maps={one.name: heat_map(one) for one in maps if one.differs},
        coded=any(tier.is_coded for tier in plan.index.tiers),
        alike=[one for one in maps if not one.differs],
        memory=data.memory,
        spectra=_spectra(data.evidence, held),
        curve=_curve_facts(data),
        stability=checked,
        page=layout.described(),
        pictures=page_pictures(layout),
        layout=layout,
        facts=_facts(data),
    )


def _uncompressed(data: ReportData) -> list[tuple[str, float]]:
    """The uncompressed cache in 16 bit and, where it is another, in the engine's own
    number format: (label, bytes of a token)."""
    found = [("uncompressed, 16 bit", data.bytes_16bit)]
    if data.bytes_baseline != data.bytes_16bit:
        same = f"uncompressed, {data.plan.index.hot_bits} bit"
        found.append((same, data.bytes_baseline))
    return found


def _curve_facts(data: ReportData) -> dict[str, object] | None:
    """The search's curve with what its section says: the chosen request's own points,
    and those of others; every point as (plan, bytes of a token, score), smallest first;
    how many the chart leaves out.
    """
    curve = data.plan.notes.get("curve")
    if not curve:
        return None
    own = [point for point in curve["points"] if point.get("of") == curve.get("of")]
    rows = [
        (
            p.get("plan", "measured"),
            data.bytes_baseline * (1 - p["removed"]),
            p["score"],
        )
        for p in curve["points"]
    ]
    lowest = lost_below(curve)
    return curve | {
        "own": len(own),
        "others": len(rows) - len(own),
        "rows": sorted(rows, key=lambda row: row[1]),
        "lowest": lowest,
        "below": sum(score < lowest for _, _, score in rows),
    }


def _facts(data: ReportData) -> dict[str, object]:
    """Facts about the build: the plan's plain notes, then the builder's own."""
    plain = {
        k: v for k, v in data.plan.notes.items() if isinstance(v, str | int | float)
    }
    return {
        name.replace("_", " "): value
        for name, value in (plain | dict(data.facts)).items()
    }


def _charts(data: ReportData, checked: Stability | None) -> dict[str, Markup]:
    """The charts that this plan has data for, by name."""
    drawn: dict[str, Markup] = {}
    if checked is not None:
        drawn["stability"] = charts.missed_energy(checked.missed_k, checked.missed_v)
    if (curve := data.plan.notes.get("curve")) and curve["points"]:
        common = None if data.bytes_16bit == data.bytes_baseline else data.bytes_16bit
        sizes = Sizes(data.bytes_baseline, data.bytes_per_token, common)
        drawn["curve"] = accuracy_curve(curve, sizes)
    return drawn


def _maps(plan: CompressionPlan, held: Kept) -> list[Map]:
    """The heads: ranks always, bits where pages are quantized, tokens where a rule drops
    some. V that is a part of K has no maps of its own."""
    dims = plan.model.head_dim
    whole = f"{held.dims.sum():,.0f}"
    sides = [
        ("k", "K", held.ranks_k, held.bits_k),
        ("v", "V", held.ranks_v, held.bits_v),
    ]
    if plan.index.values_in_keys:
        sides = [("k", "K, which begins with V", held.ranks_k, held.bits_k)]
    shown: list[Map] = []
    for side, name, ranks, _ in sides:
        title = f"{name}: {ranks.sum():,.0f} of {whole} dimensions"
        shown.append(Map(f"ranks_{side}", title, held.real(ranks), dims))
    if any(tier.is_coded for tier in plan.index.tiers):
        top = float(max(held.bits_k.max(), held.bits_v.max()))
        for side, name, _, bits in sides:
            title = f"{name}: bits of a number"
            shown.append(Map(f"bits_{side}", title, held.real(bits), top, 1))
    if held.mean_share < 1:
        shown.append(
            Map(
                "share",
                f"tokens kept, % of {held.tokens:,}",
                held.real(100 * held.share),
                100,
            )
        )
    return shown


def _spectra(evidence: Evidence | None, held: Kept) -> Sequence[Markup]:
    """Singular values of K and V; none for a plan made without calibration."""
    if evidence is None:
        return ()
    k, v = evidence.spectrum_k, evidence.spectrum_v
    return (
        charts.spectrum("spectrum_k", "K (with its queries)", k, held.ranks_k),
        charts.spectrum("spectrum_v", "V", v, held.ranks_v),
    )


def _loss(value: float, before: str = "") -> str:
    return bounded(value, lambda number: before + cell(number))
