"""Tokens in two formats by saliency: the paper's formulas beside the pool's bytes, and
what each choice is worth.

    python -m benchmarks.zipcache [--model DIR] [--windows 4] [--salient 0.6] [--only
    NAME ...]

Every row is an exported engine. Windows of 2,048 tokens of ``eval_text.jsonl``: 1,536
are a prompt, ranked when it ends, the rest is teacher-forced through decode and scored,
all against the uncompressed engine. Rows with uniform bits are the same plan with one
format in both buckets, so they are scored alike. ``per sequence``: the values' factors
are taken from the tokens that are sealed together, as the paper does, and multiplied
back before the 16-bit cache holds them (accuracy only; bytes are those of the row that
it is compared with). One table of ratios, one of rows, one JSON line.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.methods import CONTEXT
from benchmarks.support.commands import DATA
from benchmarks.support.options import one_model, table_and_json, tell
from benchmarks.support.remembering import Remembering
from kvlathe.base import tokenizer_files
from kvlathe.base.console import print_table
from kvlathe.engines.planning import calibrated
from kvlathe.evaluation.evaluate import text_scores
from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import fold
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.onnx.model import export_onnx
from kvlathe.plan.formats import Tier
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.memory import bytes_left
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from kvlathe.runtime.sessions.host.native import NativeSession
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.tasks import tasks

LIMITS = Limits(
    max_batch_size=2, max_num_tokens=2048, max_input_len=4096, max_seq_len=4096
)
ARENA = 1 << 28
PUNCTUATION = set(".,;:!?()[]{}\"'`-=<>/\\|*#_\n")
COLUMNS = ("what", "bytes left", "perplexity ratio", "agreement", "kl")
Made = tuple[CompressionPlan, Basis]
Change = Callable[[CompressionPlan], CompressionPlan]


def ratio(
    scheme: str, batch: int, width: int, tokens: int, bits: float = 4, group: int = 32
) -> float:
    """The paper's compression ratios (section 3): 16-bit K and V of ``batch`` x
    ``tokens`` x ``width`` over codes and 16-bit scales and zeros. ``scheme``:
    groupwise, tokenwise, or separable (K by channel, V by token and channel)."""
    values = batch * width * tokens
    parameters = {
        "groupwise": 4 * values / group,
        "tokenwise": 4 * batch * tokens,
        "separable": 3 * width + 2 * batch * tokens,
    }
    return 32 * values / (2 * bits * values + 16 * parameters[scheme])


def uniform(bits: int) -> Change:
    """The same buckets, all in ``bits`` bits."""
    return lambda plan: with_cold(
        plan, lambda cold: (next(t for t in cold if t.bits_k == bits),) * len(cold)
    )


def with_cold(
    plan: CompressionPlan, change: Callable[[tuple[Tier, ...]], tuple[Tier, ...]]
) -> CompressionPlan:
    """The plan with other cold tiers."""
    groups = [
        dataclasses.replace(group, cold=change(group.cold)) for group in plan.groups
    ]
    return dataclasses.replace(plan, groups=tuple(groups))


def probed(**asked: Any) -> Change:  # noqa: ANN401  Probe's fields
    window = ObservationWindow(normalized=True)
    seen = dataclasses.replace(window, **asked)
    return lambda plan: dataclasses.replace(plan, score=seen)


def wide_values(plan: CompressionPlan) -> CompressionPlan:
    """Sealed values in 16 bit: what holds values that were quantized elsewhere."""
    return with_cold(
        plan,
        lambda cold: tuple(dataclasses.replace(tier, bits_v=16) for tier in cold),
    )


ROWS: dict[str, tuple[str, Change | None]] = {
    "the default": ("", None),
    "the paper's: codes cover a group's whole range": ("ends=kept", None),
    "... values by token, nothing folded": ("ends=kept,values=token", None),
    "... values by token, factors per sequence": (
        "ends=kept,values=token",
        wide_values,
    ),
    "keys by token": ("keys=token", None),
    "keys by token, factors folded": ("keys=folded", None),
    "uniform 4 bit": ("", uniform(4)),
    "uniform 2 bit": ("", uniform(2)),
    "uniform 4 bit, whole range": ("ends=kept", uniform(4)),
    "uniform 2 bit, whole range": ("ends=kept", uniform(2)),
    "probes: recent": ("probe=recent", None),
    "probes: random": ("probe=random", None),
    "probes: special": ("", probed(last=1)),
    "probes: all rows": ("probe=all", None),
    "accumulated score": ("score=accumulated", None),
    "accumulated score, all rows": ("score=accumulated,probe=all", None),
    "ranked by lot": ("", probed(recent=0.1, normalized=False, noise=1e6)),
}
"""Options behind ``zipcache:`` and what is then changed of the plan."""


class PerSequence(HostPages):
    """Mixed into a session: values that are sealed are quantized here, in the format
    ``bits`` of each cold bucket and with factors of the tokens that move together, and
    cached in 16 bit."""

    quantized: dict[int, int]

    def move(
        self,
        source: int,
        pages: Any,  # noqa: ANN401
        target: int,
        target_pages: Any,  # noqa: ANN401
        places: Any,  # noqa: ANN401
    ) -> None:
        if source != target:
            self.round_values(
                source, pages, self.quantized[target], places
            )  # tokens that move stay nowhere else
        super().move(source, pages, target, target_pages, places)

    def round_values(self, source: int, pages: Any, bits: int, places: Any) -> None:  # noqa: ANN401
        """Write the values at ``places`` [lanes, n] back as they are dequantized."""
        rows, p = self.rows[source], self.plan.page_tokens
        for (_, part), of_lane in zip(
            self.matrices[source].values(), places, strict=True
        ):
            values = np.concatenate([part.read(rows[page]) for page in pages])
            values[of_lane] = separable(values[of_lane], bits)
            for page, block in zip(
                pages, values.reshape(-1, p, values.shape[1]), strict=True
            ):
                part.write(rows[page], block)


def separable(x: np.ndarray, bits: int) -> np.ndarray:
    """Algorithm 1: channels divided by sqrt(max |x|), each token quantized, channels multiplied back. [n, channels]"""
    c = np.sqrt(np.maximum(np.abs(x).max(0), 1e-12))
    y, levels = x / c, (1 << bits) - 1
    low, high = y.min(1, keepdims=True), y.max(1, keepdims=True)
    scale = np.maximum((high - low) / levels, 1e-12)
    return (np.rint((y - low) / scale) * scale + low) * c


class Bench:
    """One model: its engines by plan, and the uncompressed one."""

    def __init__(
        self, model: Path, folder: Path, windows: int, threads: int, salient: float
    ) -> None:
        self.model, self.folder, self.threads, self.salient, self.built = (
            model,
            folder,
            threads,
            salient,
            0,
        )
        self.checkpoint = Checkpoint(model)
        self.stats = calibrated(self.checkpoint, "random")
        plain = self.engine(self.made("none", 32))
        plain.manifest = None
        self.baseline = Remembering(plain)
        documents = tasks.encode_documents(
            plain.tokenizer, tasks.read_texts(DATA / "eval_text.jsonl")
        )
        separator = tokenizer_files.separator(plain.tokenizer.eos_ids)
        self.windows = tasks.windows(documents, separator, windows, 2048)
        vocabulary = plain.tokenizer.backend.get_vocab()
        self.special = tuple(
            sorted(
                i
                for word, i in vocabulary.items()
                if set(word.lstrip("Ġ")) <= PUNCTUATION
            )
        )

    def made(self, request: str, bits: Any = 16) -> Made:  # noqa: ANN401  16 or 32
        shape, rope = self.checkpoint.spec.shape, self.checkpoint.spec.rope is not None
        return compose(
            parse(request), shape, rope, self.stats, RankOptions(), CacheSettings(bits)
        )

    def engine(self, made: Made, quantized: dict[int, int] | None = None) -> LLM:
        """Exported and loaded; ``quantized``: bits of the values of each cold bucket,
        by factors per sequence."""
        plan, basis = made
        self.built += 1
        folder = self.folder / f"engine{self.built}"
        folder.mkdir()
        export_onnx(
            self.checkpoint.spec, plan, fold(self.checkpoint, plan, basis), folder
        )
        kind: Any = NativeSession if native.find().native else OrtSession
        if quantized:
            kind = type("Session", (PerSequence, kind), {"quantized": quantized})
        session = kind(folder, plan, LIMITS, ARENA, self.threads)
        return LLM(session, plan, LIMITS, Tokenizer(self.model), ARENA)

    def row(self, what: str) -> dict[str, Any]:
        options, change = ROWS[what]
        salient = f"salient={self.salient}"
        plan, basis = self.made(
            f"zipcache:{','.join(filter(None, (salient, options)))}"
        )
        quantized = (
            {b: plan.index.buckets[b].tier.bits_v for b in (1, 2)}
            if change is wide_values
            else None
        )
        layout, plan = CacheLayout(plan), plan if change is None else change(plan)
        if what == "probes: special":
            assert plan.index.observation
            plan = dataclasses.replace(
                plan,
                score=dataclasses.replace(plan.index.observation, special=self.special),
            )
        llm = self.engine((plan, basis), quantized)
        found = text_scores(llm, self.baseline, self.windows)
        counted = layout if quantized else llm.layout
        left = {
            "bytes left": bytes_left(counted, CONTEXT),
            "perplexity ratio": found["perplexity_ratio"],
        }
        return {
            "what": what,
            **left,
            "agreement": found["agreement"],
            "kl": found["kl"],
        }

    def ratios(self) -> list[list[Any]]:
        """16-bit bytes over compressed ones: the paper's formulas at its sizes, its
        formula at this model's and this context, and the pool's."""
        scheme = ("groupwise", "tokenwise", "separable")
        found = [
            [
                f"{name}, 4 bit, b = 8, hd = l = 4096: the paper's",
                ratio(name, 8, 4096, 4096),
            ]
            for name in scheme
        ]
        shape = self.checkpoint.spec.shape
        width = shape.kv_heads * shape.head_dim
        mean = self.salient * 4 + (1 - self.salient) * 2
        formula = ratio("separable", 1, width, CONTEXT, mean)
        found.append(
            [
                f"separable, {mean:g} bit, this model's layer, {CONTEXT} tokens: by formula",
                formula,
            ]
        )
        layout = CacheLayout(self.made(f"zipcache:salient={self.salient}")[0])
        found.append(
            [
                f"the pool at {CONTEXT} tokens, hot tails, scores and padding counted",
                1 / bytes_left(layout, CONTEXT),
            ]
        )
        whole = 4 * shape.layers * width
        found.append(
            ["the pool, a very long sequence", whole / layout.bytes_per_token()]
        )
        return found


@click.command()
@one_model
@click.option("--windows", default=4, show_default=True)
@click.option("--salient", default=0.6, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(tuple(ROWS)),
    help="Rows in place of all.",
)
def main(
    model: Path, windows: int, salient: float, threads: int, only: tuple[str, ...]
) -> None:
    with tempfile.TemporaryDirectory() as home:
        bench, rows = Bench(model, Path(home), windows, threads, salient), []
        ratios = bench.ratios()
        for what in only or ROWS:
            rows.append(bench.row(what))
            tell(rows[-1])
    print_table("16-bit bytes over compressed ones", ("scheme", "ratio"), ratios)
    title = f"{model.name}, {windows} windows, bytes at {CONTEXT} tokens"
    about = {"model": model.name, "ratios": dict(ratios)}
    table_and_json("zipcache", title, COLUMNS, rows, **about)


if __name__ == "__main__":
    main()
