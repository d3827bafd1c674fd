"""report.html: stands alone, says what the plan says, escapes what it is given."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlathe.base.console import cell, human_bytes
from kvlathe.export.methods.evidence import Evidence
from kvlathe.export.report.heading import Heading, heading, renew
from kvlathe.export.report.heads import kept
from kvlathe.export.report.page_rows import page_pictures, runs
from kvlathe.export.report.report import ReportData, render, write_report
from kvlathe.export.report.sizes import bars, of_page
from kvlathe.export.report.stability import stability
from kvlathe.export.report.words import OURS, WORDS
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL, Budget
from kvlathe.plan.measurement import MOST, LengthLoss, Measurement
from kvlathe.plan.memory import bytes_left, memory_table
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.stages import Stage
from kvlathe.plan.token_score import ObservationWindow

SHAPE = ModelShape(
    layers=4,
    query_heads=4,
    kv_heads=2,
    head_dim=64,
    hidden_size=256,
    vocab_size=512,
    max_positions=4096,
)


def make_plan(
    shape: ModelShape = SHAPE, step: int = 16, notes: dict | None = None
) -> CompressionPlan:
    lanes = tuple(
        Lane(
            layer,
            head,
            shape.head_dim,
            shape.head_dim - step * (layer % 3),
            shape.head_dim - step * head % 48,
            projected=True,
        )
        for layer in range(shape.layers)
        for head in range(shape.kv_heads)
    )
    return CompressionPlan(
        shape,
        lanes,
        (Group(tuple(range(len(lanes))), Tier(32, 32)),),
        compression="<b>demo</b>",
        notes=notes or {},
    )


def make_data(plan: CompressionPlan | None = None) -> ReportData:
    plan = plan or make_plan()
    m, rng = plan.model, np.random.default_rng(0)
    spectrum = np.sort(rng.exponential(size=(m.layers, m.kv_heads, m.head_dim)) ** 3)[
        ..., ::-1
    ]
    positive = rng.uniform(0.01, 0.1, size=(8, m.layers, m.kv_heads))
    dims = 2 * m.head_dim * m.kv_heads * m.layers
    return ReportData(
        model="tiny & <model>",
        command="kvlathe build --model 'a <b>'",
        created="2026-01-01T00:00:00Z",
        plan=plan,
        bytes_per_token=CacheLayout(plan).bytes_per_token(),
        bytes_baseline=4 * dims,
        bytes_16bit=2 * dims,
        evidence=Evidence(spectrum, spectrum, *positive),
        limits={"max_seq_len": 4096},
        versions={"kvlathe": "0"},
    )


@cache
def page() -> str:
    """The report of make_data()."""
    return render(make_data())


def words(data: ReportData) -> str:
    """A report without the charts of its evidence, which take most of the time."""
    return render(dataclasses.replace(data, evidence=None))


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if (
                name.split(":")[-1] in {"src", "href", "action", "data"}
                and value
                and not value.startswith(("#", "data:"))
            ):
                self.targets.append(value)
            if name == "id" and value:
                self.ids.append(value)


def parsed(html: str) -> Links:
    links = Links()
    links.feed(html)
    return links


def test_the_page_stands_alone_and_is_small(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", make_data())
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    links = parsed(html)
    assert not links.targets and not {"script", "link", "iframe"} & set(links.tags)
    assert not re.search(r"url\((?!#)|@import", html)
    assert links.tags.count("svg") == 5 and len(html) < 400_000


def test_ids_of_the_charts_do_not_collide() -> None:
    """Two charts with one clip path's id would cut each other."""
    html = page()
    ids = parsed(html).ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", html)) | set(
        re.findall(r'xlink:href="#([^"]+)"', html)
    ) <= set(ids)


def test_names_and_commands_are_escaped() -> None:
    html = page()
    assert (
        "<model>" not in html
        and "tiny &amp; &lt;model&gt;" in html
        and "<b>demo" not in html
    )


def test_a_renewed_page_is_the_page_of_the_other_build() -> None:
    """Nothing else depends on model name, command and time, and escaped text cannot end
    a field or open another."""
    data = make_data()
    told: dict[str, Any] = {
        "model": '<i data-field="model">',
        "command": "a \\1 'b' <c>\n&amp;",
        "created": "2030-02-03T04:05:06+00:00",
        "engine": Path("out/a <b>"),
        "checkpoint": Path("models/it's"),
    }
    other = render(dataclasses.replace(data, **told))
    fields = heading(Heading(compression=data.plan.compression, **told))
    assert renew(page(), fields) == other
    assert other.count('data-field="') == len(fields) == 7


def prose(html: str) -> str:
    """The text of a page, its charts and titles aside."""
    html = re.sub(r"<svg.*?</svg>|<style>.*?</style>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def test_every_saving_names_its_length() -> None:
    """The bytes left at a length are those of ``bytes_left``, however they are shown."""
    data = dataclasses.replace(make_data(sealed_plan(1024)), longest=4096)
    layout = CacheLayout(data.plan)
    text = prose(words(data))
    gone = {n: 100 * (1 - bytes_left(layout, n)) for n in (1024, 4096)}
    assert gone[1024] < gone[4096] - 10
    assert f"KV cache of 4,096 tokens {gone[4096]:.1f} % less" in text
    assert f"at 1,024 tokens {gone[1024]:.1f} % less" in text
    for bar in bars(layout, 4096, [])[:2]:
        left = data.bytes_16bit * bytes_left(layout, bar.tokens or 0)
        assert bar.total == pytest.approx(left)
        assert f"{bar.label} {cell(bar.total)} bytes" in text


def test_nothing_longer_than_the_engine_takes_is_claimed() -> None:
    data = dataclasses.replace(make_data(sealed_plan(512)), longest=2048, limits={})
    text = prose(words(data))
    assert "KV cache of 2,048 tokens" in text and "4,096" not in text


@pytest.mark.parametrize("make", [lambda: make_plan(), lambda: sealed_plan()])
def test_full_pages_cost_what_the_layout_says(
    make: Callable[[], CompressionPlan],
) -> None:
    """The last bar of a plan that keeps all tokens is the number of the manifest."""
    layout = CacheLayout(make())
    *_, last = bars(layout, 4096, [("uncompressed", 8.0)])
    assert last.tokens is None
    assert last.total == pytest.approx(layout.bytes_per_token())
    for bucket, stride in zip(
        layout.plan.index.buckets, layout.page_stride, strict=True
    ):
        assert sum(of_page(layout, bucket).values()) == stride


def test_no_saving_is_told_twice() -> None:
    """A 16-bit engine has one baseline, a 32-bit engine two different ones."""
    plan = sealed_plan()
    data = make_data(plan)
    same = dataclasses.replace(data, bytes_baseline=data.bytes_16bit, longest=4096)
    saving = f"{100 * (1 - bytes_left(CacheLayout(plan), 4096)):.1f} % less"
    text = prose(words(same))
    assert text.count(saving) == 1 and "in this engine's" not in text
    other = prose(words(dataclasses.replace(data, longest=4096)))
    assert "than uncompressed in this engine's" in other


LOSS = Measurement(
    (
        LengthLoss(1024, 2, 2046, 0.0105, 0.952, 1.0125, 64, 62),
        LengthLoss(4096, 1, 1024, 0.0381, 0.949, 1.0175, 0, 0),
    ),
    "held-out text",
    "whole sequences",
    "",
    12.0,
)


def test_accuracy_comes_first_and_beside_the_uncompressed_model() -> None:
    data = dataclasses.replace(make_data(), loss=LOSS)
    text = prose(words(data))
    found = LOSS.whole
    cards = text[: text.index("kvlathe build")]
    told = f"KL {found.kl:.4g} nats a token this engine uncompressed"
    told += f" same next token {100 * found.same_token:.1f} % 100 %"
    assert told in cards and cards.index("Lost") < cards.index("KV cache of")
    assert f"perplexity x{found.perplexity_ratio:.4g} x1" in cards
    assert "exercises kept 62 64" in cards
    assert "at 1,024 and 4,096 tokens of held-out text" in cards
    assert "most at 4,096: KL 0.0381" in cards
    assert "62 of 64" in text and "none asked" in text


@pytest.mark.parametrize(
    ("change", "marked"),
    [
        ({}, []),
        ({"kl": 0.06}, ["KL"]),
        ({"same_token": 0.89}, ["same next token"]),
        ({"kept": 31}, ["exercises kept"]),
        ({"kl": 0.06, "kept": 31}, ["KL", "exercises kept"]),
    ],
)
def test_the_number_that_breaks_a_model_is_marked(
    change: dict[str, Any], marked: list[str]
) -> None:
    first, second = LOSS.lengths
    loss = dataclasses.replace(
        LOSS, lengths=(dataclasses.replace(first, **change), second)
    )
    page = words(dataclasses.replace(make_data(), loss=loss))
    assert re.findall(r'<td class="n bad" data-name="([^"]+)"', page) == marked
    card = page[page.index("Lost beside") : page.index("KV cache of")]
    assert card.count("bad") == len(marked)
    assert ('<b class="bad">' in card) == ("KL" in marked)


def test_a_loss_without_bound_is_no_number_of_the_page() -> None:
    lost = LengthLoss(1024, 2, 2046, MOST, 0.0, MOST)
    text = words(
        dataclasses.replace(make_data(), loss=Measurement((lost,), "", "", "", 1.0))
    )
    assert "KL without bound" in prose(text) and "000,000" not in prose(text)
    assert "perplexity without bound" in lost.words


def test_bits_are_said_with_and_without_scales() -> None:
    """Each against its own sum over the pages that stay."""
    plan = sealed_plan()
    layout = CacheLayout(plan)
    whole = sum(layout.page_stride[bucket.number] for bucket in plan.index.buckets[1:])
    numbers = sum(lane.rank_k + lane.rank_v for lane in plan.lanes) * plan.page_tokens
    held = kept(plan)
    assert held.mean_bits == pytest.approx(3)
    assert held.whole_bits == pytest.approx(8 * whole / numbers) and held.whole_bits > 3
    text = prose(words(make_data(plan)))
    assert f"3 bits on average, without scales ; {held.whole_bits:.4g} with" in text
    assert "not quantized" in prose(words(make_data()))


def test_commands_on_the_page_name_the_engine_and_the_checkpoint() -> None:
    data = dataclasses.replace(
        make_data(), engine=Path("out/my engine"), checkpoint=Path("models/m")
    )
    text = prose(words(data))
    beside = "'out/my engine-uncompressed'"
    assert f"kvlathe build --model models/m --output-dir {beside}" in text
    assert f"kvlathe eval 'out/my engine' --baseline {beside} --suite" in text
    assert f"kvlathe bench-serve {beside} 'out/my engine'" in text


def test_words_have_a_meaning_and_a_link_to_it() -> None:
    html = words(dataclasses.replace(make_data(sealed_plan()), loss=LOSS))
    ids = parsed(html).ids
    links = re.findall(r'class="word" href="#([^"]+)"', html)
    assert len(set(links)) >= 8 and set(links) <= set(ids)
    own = (Path(__file__).parents[3] / "docs" / "glossary.md").read_text("utf-8")
    for word in OURS:
        assert re.search(rf"^\| {word}\b", own, re.MULTILINE), word
    assert all(f'<dt id="word-{w.lower().replace(" ", "-")}"' in html for w in WORDS)


def test_pages_that_look_alike_are_drawn_once() -> None:
    """Two groups with the same formats and lanes of the same ranks: one picture."""
    shape = dataclasses.replace(SHAPE, layers=4, kv_heads=1)
    lanes = tuple(Lane(layer, 0, 64, 64, 64) for layer in range(4))
    cold = (Tier(4, 4, axis_v="rank"),)
    groups = (
        Group((0, 1), Tier(16, 16), cold, Budget(512)),
        Group((2, 3), Tier(16, 16), cold, Budget(1024)),
    )
    plan = CompressionPlan(shape, lanes, groups, score=ObservationWindow(last=8))
    layout = CacheLayout(plan)
    drawn = page_pictures(layout)
    count = len(plan.index.buckets)
    assert sorted(b for one in drawn for b in one.buckets) == list(range(count))
    cold_ones = [one for one in drawn if one.format == "4 bit"]
    assert len(cold_ones) == 1 and len(cold_ones[0].buckets) == 2
    html = words(make_data(plan))
    assert html.count("<h3>Bucket") == len(drawn) < count


def test_a_picture_shows_every_byte_of_its_layers() -> None:
    plan = sealed_plan()
    layout = CacheLayout(plan)
    for one in page_pictures(layout):
        for number in one.buckets:
            rows = {row.layers: row for row in one.rows}
            bucket = layout.lane_bytes(number)
            assert set(rows) == {"0, 1"} and one.left_out == 0
            assert 2 * rows["0, 1"].size == sum(bucket.values())
    scales = [kind for kind, _ in page_pictures(layout)[-1].rows[0].parts]
    assert scales == ["k", "scales", "v", "scales"]
    legend = re.findall(r'<li><i class="(\w+)"', words(make_data(plan)))
    assert "scales" in legend


def test_runs_of_layers_are_short() -> None:
    assert runs([0, 1, 2, 3, 5]) == "0 to 3, 5"
    assert runs([0, 1, 4]) == "0, 1, 4" and runs([7]) == "7"


def test_formats_budgets_and_stages_are_said() -> None:
    lanes = tuple(Lane(layer, 0, 64, 64, 64) for layer in range(4))
    cold = (Tier(8, 2, "rank", "rank"),)
    groups = tuple(
        Group(own, Tier(16, 16), cold, Budget(512)) for own in ((0, 1), (2, 3))
    )
    shape = dataclasses.replace(SHAPE, kv_heads=1, max_positions=2048)
    stages = (Stage(0), Stage(2, 1024))
    plan = CompressionPlan(
        shape,
        lanes,
        groups,
        score=ObservationWindow(last=8, accumulated=False),
        stages=stages,
    )
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", words(make_data(plan))))
    assert (
        "1 K 8 bit, V 2 bit 0 to 1 2" in text
        and "2 16 bit 2 to 3 2" in text
        and "until they are sealed" in re.sub(" +", " ", text)
    )
    assert "KV cache of 2,048 tokens" in text
    assert "From layer 2 on a prompt computes at most 1,024 of its tokens" in text
    layout = CacheLayout(plan)
    cold = of_page(layout, plan.index.buckets[1])
    assert cold["k"] / cold["v"] == pytest.approx(8 / 2)
    assert (
        cold["scales"] == 2 * 2 * 2 * 2 * 64
    )  # lanes, sides, halves of 2 bytes, tokens


def test_every_rank_is_on_the_heat_map() -> None:
    plan = make_plan(
        dataclasses.replace(SHAPE, layers=3, kv_heads=4, head_dim=128), step=16
    )
    html = words(make_data(plan))
    drawn = re.findall(r">(\d+)</text>", html)
    for lane in plan.lanes:
        assert str(lane.rank_k) in drawn and str(lane.rank_v) in drawn


def sealed_plan(budget: int = 0) -> CompressionPlan:
    """Two heads a layer; head 0 is sealed in 4 bit, head 1 in 2."""
    shape = dataclasses.replace(SHAPE, layers=2)
    lanes = tuple(Lane(i // 2, i % 2, 64, 64, 64) for i in range(4))
    life = Budget(budget) if budget else SEAL
    groups = (
        Group((0, 2), Tier(16, 16), (Tier(4, 4, axis_v="rank"),), life),
        Group((1, 3), Tier(16, 16), (Tier(2, 2, axis_v="rank"),), life),
    )
    window = ObservationWindow(last=8) if budget else None
    return CompressionPlan(shape, lanes, groups, score=window)


def test_heads_that_are_alike_are_a_sentence_and_no_map() -> None:
    html = words(make_data(make_plan(step=0)))
    assert html.count("in every head alike") == 2
    whole = SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim
    assert f"K: {whole:,} of {whole:,} dimensions, in every head alike" in html


def test_bits_of_heads_are_shown_where_pages_are_quantized() -> None:
    held = kept(sealed_plan())
    assert held.bits_k[0] == pytest.approx([4, 2]) and held.mean_bits == pytest.approx(
        3
    )
    assert (held.share == 1).all()
    html = words(make_data(sealed_plan()))
    assert "K: bits of a number" in html and "tokens kept" not in html
    assert "bits of a number" not in page()


def test_tokens_of_heads_are_shown_where_a_rule_drops_some() -> None:
    plan = sealed_plan(1024)
    held = kept(plan)
    assert held.mean_share == pytest.approx(1024 / held.tokens)
    assert "tokens kept, % of 4,096" in words(make_data(plan))


@pytest.mark.parametrize("plan", [make_plan(), sealed_plan(), sealed_plan(1024)])
def test_sentences_do_not_run_together(plan: CompressionPlan) -> None:
    """Jinja drops the line break behind a block."""
    text = re.sub(r"<[^>]+>", " ", words(make_data(plan)))
    assert re.findall(r"\w+\.[A-Z]\w*", text) == []


@pytest.mark.parametrize(
    ("missed", "verdict"), [(0.002, "Yes."), (0.03, "Nearly."), (0.2, "No.")]
)
def test_stability_is_said_in_words(missed: float, verdict: str) -> None:
    data = make_data()
    assert data.evidence is not None
    everywhere = np.full_like(data.evidence.missed_k, missed)
    evidence = dataclasses.replace(
        data.evidence, missed_k=everywhere, missed_v=everywhere
    )
    held = kept(data.plan)
    found = stability(evidence, held, held.dims)
    assert found is not None and found.verdict == verdict
    html = render(dataclasses.replace(data, evidence=evidence))
    assert verdict in html and f"{100 * missed:.2f} %" in html


def test_whole_spaces_are_no_evidence_of_enough_text() -> None:
    """Two halves of the text miss nothing of a head that keeps all dimensions: where no
    head is cut, nothing is claimed."""
    whole = make_data(make_plan(step=0))
    html = render(whole)
    assert "Not checked: every head keeps all" in html
    assert not re.search(r"<b>(Yes|Nearly|No)\.</b>", html)
    assert "<b>No.</b>" in page() or "<b>Nearly.</b>" in page()


def test_stability_counts_heads_that_are_cut_alone() -> None:
    data = make_data()
    assert data.evidence is not None
    held = kept(data.plan)
    cut_k, cut_v = held.ranks_k < held.dims, held.ranks_v < held.dims
    missed_k = np.where(cut_k, 0.02, 0.0)
    missed_v = np.where(cut_v, 0.04, 0.0)
    evidence = dataclasses.replace(data.evidence, missed_k=missed_k, missed_v=missed_v)
    found = stability(evidence, held, held.dims)
    assert found is not None
    assert found.checked == cut_k.sum() + cut_v.sum() < 2 * cut_k.size
    assert found.missed == pytest.approx(4) and found.worst == pytest.approx(4)


def test_the_report_shows_memory_where_it_is_known() -> None:
    data = make_data()
    rows = memory_table(CacheLayout(data.plan), 4096, 3)
    html = words(dataclasses.replace(data, memory=rows))
    for row in rows:
        for name in ("steady", "peak", "uncompressed", "batch_steady", "batch_peak"):
            assert human_bytes(row[name]) in html
    assert "3 at their peak" in html
    assert "Memory to plan for" not in page()


@pytest.mark.parametrize("target", [0.97, None])
def test_the_report_of_a_search_shows_its_curve(target: float | None) -> None:
    points = [{"rate": r, "removed": r, "score": 1 - r * r} for r in (0.1, 0.2, 0.3)]
    curve = {
        "metric": "retrieval",
        "baseline": 0.98,
        "target": target,
        "points": points,
    }
    html = words(make_data(make_plan(notes={"curve": curve})))
    assert (
        "3 plans were measured by retrieval" in html and "of other methods" not in html
    )
    assert ("required" in html) == (target is not None)
    left = "Plans that were left as soon as too much had failed: 2."
    assert left not in html
    cut = words(make_data(make_plan(notes={"curve": curve | {"cut_short": 2}})))
    assert left in cut


def test_other_methods_are_lines_of_the_same_chart_and_rows_of_its_table() -> None:
    scores = {"ours": (0.99, 0.98, 0.1), "theirs": (0.97, 0.7)}
    points = [
        {
            "of": of,
            "plan": f"{of}:size={i}",
            "removed": (0.5, 0.75, 0.875)[i],
            "score": score,
        }
        for of, own in scores.items()
        for i, score in enumerate(own)
    ]
    curve = {
        "metric": "agreement",
        "baseline": 1.0,
        "target": 0.98,
        "of": "ours",
        "points": points,
    }
    data = make_data(make_plan(notes={"curve": curve}))
    html = words(data)
    assert (
        "3 plans were measured by agreement" in html
        and "and 2 of other methods" in html
    )
    assert "ends at 0.75; 2 plans are below it" in html
    chart = html[html.index("<svg", html.index("Accuracy</h2>")) :]
    legend = chart[: chart.index("</svg>")]
    assert (
        legend.count(">ours</text>") == legend.count(">theirs</text>") == 1
        and "size=" not in legend
    )
    cells = re.findall(r'<td>(\S+:size=\d)</td><td class="n">([\d,]+)</td>', html)
    wanted = {
        p["plan"]: f"{data.bytes_baseline * (1 - float(p['removed'])):,.0f}"
        for p in points
    }
    assert dict(cells) == wanted
    assert [name for name, _ in cells] == sorted(
        wanted, key=lambda name: (int(wanted[name].replace(",", "")), name)
    )


def test_a_plan_without_calibration_says_how_to_measure() -> None:
    bare = dataclasses.replace(make_data(), evidence=None)
    html = render(bare)
    assert "Singular values" not in html and "kvlathe eval" in html


def test_the_report_of_a_large_model_stays_small() -> None:
    plan = make_plan(
        dataclasses.replace(SHAPE, layers=80, kv_heads=8, query_heads=64, head_dim=128)
    )
    assert len(render(make_data(plan))) < 1_500_000
