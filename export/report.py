"""report.html: what was built, what it saves and what it costs, on one self-contained page.

The page needs no network and no other file; it follows the reader's light or dark setting and prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import numpy as np

from kvlathe.console import cell, human_bytes
from kvlathe.export import report_charts as charts
from kvlathe.export.layout import CacheLayout
from kvlathe.export.methods import Evidence
from kvlathe.export.plan import CompressionPlan
from kvlathe.export.report_heading import heading

TEMPLATE = Path(__file__).with_name("report.html.j2")


@dataclass(frozen=True)
class ReportData:
    """Everything the page shows. Byte counts are of one token, all padding and metadata counted.

    ``bytes_baseline`` is the uncompressed cache in the engine's own number format, ``bytes_16bit`` the uncompressed
    cache in 16 bit. ``evidence``: spectra and stability, None for a plan made without calibration. ``measured`` holds
    accuracy by name where somebody measured it; ``facts``, ``limits`` and ``versions`` are shown as they are.
    """

    model: str
    command: str
    created: str
    plan: CompressionPlan
    bytes_per_token: float
    bytes_baseline: float
    bytes_16bit: float
    evidence: Evidence | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    limits: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def write_report(path: Path, data: ReportData) -> None:
    """Write the page to ``path``."""
    path.write_text(render(data), encoding="utf-8")


def render(data: ReportData) -> str:
    """The page as HTML. Values are escaped; only the charts, which we draw ourselves, enter as markup."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(cell=cell, human_bytes=human_bytes)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        data=data,
        heading=heading(data.model, data.plan.compression, data.command, data.created),
        plan=data.plan,
        removed=1 - data.bytes_per_token / data.bytes_baseline,
        removed_16bit=1 - data.bytes_per_token / data.bytes_16bit,
        charts=_charts(data),
        curve=_curve_facts(data),
        stability=_stability_rows(data.evidence),
        page=CacheLayout(data.plan).described(),
        layout=CacheLayout(data.plan),
        facts=_facts(data),
    )


def _curve_facts(data: ReportData) -> dict[str, object] | None:
    """The search's curve with what its section says: the chosen request's own points, and those of others; every point
    as (plan, bytes of a token, score), smallest first; how many the chart leaves out.
    """
    curve = data.plan.notes.get("curve")
    if not curve:
        return None
    own = [point for point in curve["points"] if point.get("of") == curve.get("of")]
    rows = [(p.get("plan", "measured"), data.bytes_baseline * (1 - p["removed"]), p["score"]) for p in curve["points"]]
    lowest = charts.lost_below(curve)
    return curve | {
        "own": len(own),
        "others": len(rows) - len(own),
        "rows": sorted(rows, key=lambda row: row[1]),
        "lowest": lowest,
        "below": sum(score < lowest for _, _, score in rows),
    }


def _facts(data: ReportData) -> dict[str, object]:
    """How the engine was made: the plan's plain notes, then what the builder adds."""
    plain = {k: v for k, v in data.plan.notes.items() if isinstance(v, str | int | float)}
    return {name.replace("_", " "): value for name, value in (plain | dict(data.facts)).items()}


def _charts(data: ReportData) -> dict[str, charts.Markup]:
    """The charts that this plan has data for, by name."""
    plan = data.plan
    drawn = {
        "bytes": charts.bytes_bars(_byte_rows(data)),
        "ranks": charts.rank_maps(plan),
        **{f"page{i}": charts.page_map(plan, i) for i in range(len(plan.buckets))},
    }
    if (e := data.evidence) is not None:
        drawn["spectra"] = charts.spectra(e.spectrum_k, e.spectrum_v, plan)
        rows = [
            ("K", e.delta_k / e.epsilon_k, e.angle_k, e.missed_k),
            ("V", e.delta_v / e.epsilon_v, e.angle_v, e.missed_v),
        ]
        drawn["stability"] = charts.stability_by_layer(rows)
    if (curve := plan.notes.get("curve")) and curve["points"]:
        common = None if data.bytes_16bit == data.bytes_baseline else data.bytes_16bit
        drawn["curve"] = charts.accuracy_curve(curve, data.bytes_baseline, data.bytes_per_token, common)
    return drawn


def _byte_rows(data: ReportData) -> list[tuple[str, float, float]]:
    """(label, bytes of K, bytes of V) of one token: uncompressed in 16 bit, in the engine's format, and this engine."""
    share = _share_of_keys(data.plan)
    bits = {data.plan.tiers[bucket.tier].bits_k for bucket in data.plan.buckets if bucket.source is None}
    same = f"uncompressed, {max(bits)} bit"
    rows = [("uncompressed, 16 bit", data.bytes_16bit / 2, data.bytes_16bit / 2)]
    if same != rows[0][0]:
        rows.append((same, data.bytes_baseline / 2, data.bytes_baseline / 2))
    return [*rows, ("this engine", data.bytes_per_token * share, data.bytes_per_token * (1 - share))]


def _share_of_keys(plan: CompressionPlan) -> float:
    """Of the bytes of K and V, metadata included, in a long sequence."""
    layout, k, v = CacheLayout(plan), 0, 0
    for b in (b for b in range(len(plan.buckets)) if not plan.cold(b)):
        keys = sum((slab := layout.slab(b, lane)).v - slab.k for lane in plan.buckets[b].lanes)
        held = layout.held(b, layout.long)
        k, v = k + held * keys, v + held * (layout.scores_at(b) - keys)
    return k / (k + v)


def _stability_rows(evidence: Evidence | None) -> list[tuple[str, float, float, float, float, float]]:
    """(what, mean epsilon, mean delta, delta / epsilon in %, largest angle in degrees, energy missed in %)."""
    if evidence is None:
        return []
    pairs = (
        ("K (with its queries)", evidence.epsilon_k, evidence.delta_k, evidence.angle_k, evidence.missed_k),
        ("V", evidence.epsilon_v, evidence.delta_v, evidence.angle_v, evidence.missed_v),
    )
    return [
        (
            name,
            float(e.mean()),
            float(d.mean()),
            float(100 * d.mean() / e.mean()),
            float(np.degrees(a.max())),
            float(100 * m.mean()),
        )
        for name, e, d, a, m in pairs
    ]
