"""What fewer dimensions buy: bytes removed against KL of every basis and allocation, at
the papers' removal rates, on text that no statistic has read.

    python -m benchmarks.rank_curves --model DIR [--rates 0.05 0.1 0.15 0.25]

A row is scored as a build's search scores its plans: one window at the first positions,
one at the last ones that are served. "measured" is the balanced basis with its ranks by
the model's own sensitivity (what auto has, without bits and windows).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.commands import parser_of
from benchmarks.support.options import table_and_json
from kvlathe.base.package import FOLDER
from kvlathe.engines.planning import calibrated, open_checkpoint
from kvlathe.export.bases.rotation import Rotation, balanced_rotation
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods import fdc
from kvlathe.export.methods.composition import CacheSettings, Made, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.lowrank import low_rank
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.methods.variants import removed
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.search.measured import uncompressed
from kvlathe.export.search.readings import of_text
from kvlathe.export.search.sensitivity import Candidate, losses
from kvlathe.measuring.divergence import Divergence
from kvlathe.plan.formats import Format
from kvlathe.plan.heads import RANK_MULTIPLE
from kvlathe.tasks.held_out import HeldOut
from kvlathe.tasks.tasks import FolderEncoder

RATES = (0.05, 0.1, 0.15, 0.25)
DATA = FOLDER.parent / "data"
CALIBRATION, TEXT = DATA / "calibration_text.jsonl", DATA / "eval_text.jsonl"
SETTINGS = CacheSettings(16)
EIGHT_BITS = Format(8, "rank", 128)
"""Codes in which a cut is priced: sensitivity knows no others, and these lose next to
nothing."""
COLUMNS = {
    "request": "compression",
    "calibrated": "calibrated on",
    "rate": "r",
    "removed": "bytes removed",
    "kl_first": "KL, first positions",
    "kl_last": "KL, last positions",
    "same": "same token",
    "ratio": "perplexity",
}


def curves(
    checkpoint: Checkpoint,
    rates: list[float],
    tokens: int,
    only: list[str],
    folder: Path | None,
) -> Iterator[dict[str, Any]]:
    """A row for every request and rate."""
    divergence = Divergence(checkpoint, _windows(checkpoint, tokens))
    for request, source, plan in _requests(checkpoint, folder):
        if only and f"{request}/{source.split()[0]}" not in only:
            continue
        for rate in rates:
            began = time.monotonic()
            made = plan(rate)
            first, last = divergence.sums(made)
            both = (first + last).loss(tokens)
            yield {
                "request": request,
                "calibrated": source,
                "rate": rate,
                "removed": round(removed(made[0], SETTINGS.bits), 4),
                "kl_first": round(first.kl / first.rows, 5),
                "kl_last": round(last.kl / last.rows, 5),
                "same": round(both.same_token, 3),
                "ratio": round(both.perplexity_ratio, 4),
                "seconds": round(time.monotonic() - began, 1),
            }


def _windows(checkpoint: Checkpoint, tokens: int) -> list[list[int]]:
    encoder = FolderEncoder(checkpoint.path)
    text = HeldOut([TEXT], encoder, checkpoint.spec.vocab_size)
    return [text.window(tokens) for _ in range(2)]


Plan = Callable[[float], Made]


def _requests(
    checkpoint: Checkpoint, folder: Path | None
) -> Iterator[tuple[str, str, Plan]]:
    """Each request with what it is calibrated on and its plans by the rate. ``folder``
    keeps statistics."""
    shape, has_rope = checkpoint.spec.shape, checkpoint.spec.rope is not None

    @cache
    def stats(source: str) -> Stats:
        kind = "random" if source == "random tokens" else str(CALIBRATION)
        path = folder and folder / f"{source.split()[0]}.npz"
        if path and path.is_file():
            return Stats.load(path)
        found = calibrated(checkpoint, kind, with_entropies=False)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
        return found

    def plain(request: str, source: str) -> Plan:
        def plan(rate: float) -> Made:
            options = RankOptions(removal_rate=rate)
            return compose(
                parse(request), shape, has_rope, stats(source), options, SETTINGS
            )

        return plan

    for request, source in (
        ("fdc", "random tokens"),
        ("fdc", "text"),
        ("fdc:basis=balanced", "random tokens"),
        ("fdc:basis=balanced", "text"),
        ("zack", "text"),
    ):
        yield request, source, plain(request, source)

    @cache
    def priced() -> Rotation:
        return _priced(checkpoint, stats("text"))

    def measured(rate: float) -> Made:
        """The ranks of ``priced`` for the bytes of ``fdc`` at that rate."""
        whole, _ = plain("fdc", "text")(0.0)
        options = RankOptions(removal_rate=rate, basis="balanced")

        def rotate(given: Stats, asked: RankOptions) -> Rotation:
            if asked.basis == "svd":  # the papers', which the rate is taken of
                return fdc.rotate(given, asked)
            return priced()

        ranks = low_rank(stats("text"), options, rotate)
        assert ranks.lanes is not None
        return dataclasses.replace(whole, lanes=ranks.lanes), ranks.basis

    yield "measured", "text", measured


def _priced(checkpoint: Checkpoint, stats: Stats) -> Rotation:
    """The balanced basis; what a dim's removal costs, by the model's gradients."""
    whole = balanced_rotation(stats)
    d = stats.shape.head_dim
    ranks = range(RANK_MULTIPLE, d, RANK_MULTIPLE)

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.ascontiguousarray(x), dtype=torch.float32)

    def cuts(side: str, layer: int, head: int) -> list[Candidate]:
        at = (layer, head)
        into, back, centre = whole.b[at], whole.a[at], whole.centre_k[at]
        if side == "v":
            into, back, centre = whole.a_v[at], whole.o_v[at].T, whole.centre_v[at]
        made = []
        for rank in ranks:
            kept = tensor(into[:, :rank]), tensor(back[:, :rank]), tensor(centre)
            made.append(Candidate(*kept, (EIGHT_BITS,)))
        return made

    text = HeldOut([CALIBRATION], FolderEncoder(checkpoint.path), 0)
    readings = of_text([text.window(1024) for _ in range(2)])
    model = uncompressed(checkpoint)
    found = losses(model, readings, cuts, (), SETTINGS.page_tokens).forms[0]
    # [2 lanes, ranks]: of each block of dims, what it adds as ranks fall.
    falling = np.minimum.accumulate(found, -1)
    blocks = falling - np.pad(falling[:, 1:], ((0, 0), (0, 1)))
    each = np.repeat(blocks, RANK_MULTIPLE, -1) / RANK_MULTIPLE
    each = np.pad(each, ((0, 0), (RANK_MULTIPLE, 0)), constant_values=np.inf)
    k, v = each.reshape(2, *whole.loss_k.shape)
    return dataclasses.replace(whole, loss_k=k, loss_v=v)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--tokens", type=int, default=1024, help="of each window")
    parser.add_argument("--max-seq-len", type=int)
    parser.add_argument("--only", nargs="*", default=[], metavar="REQUEST/random|text")
    parser.add_argument("--statistics", type=Path, help="a folder that keeps them")
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(arguments.model, arguments.max_seq_len)
    rows = []
    for row in curves(
        checkpoint,
        arguments.rates,
        arguments.tokens,
        arguments.only,
        arguments.statistics,
    ):
        print(row, flush=True)
        rows.append(row)
    shown = [{COLUMNS[x]: row[x] for x in COLUMNS} for row in rows]
    about = {"model": str(arguments.model), "tokens": arguments.tokens}
    table_and_json("rank_curves", "ranks", list(COLUMNS.values()), shown, **about)


if __name__ == "__main__":
    main()
