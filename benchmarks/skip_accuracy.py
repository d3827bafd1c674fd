"""What leaving out far tiles (BLASST, arXiv 2512.12087) would cost a trained model, and how
many there are: decode steps after a prompt, in float32 with transformers.

    python benchmarks/skip_accuracy.py --model DIR [--text F] [--retrieval F]

A prompt is computed whole, as everywhere. Then rows are decoded in one forward pass, each
as a decode step would be: the tokens of pages before its own are in tiles of 64, those of
its own page are not. A tile is left out for a KV head if the scores of all its query heads
lie more than the limit below the largest of the newest 16 tokens and of the tiles before
it. So no kernel leaves out more.

For every length the last ``--scored`` tokens of each window are decoded: their perplexity
over that without a limit, and the share of tiles left out, by layer. Retrieval is the share
of questions whose answers are exact, each token after the right ones. One table and one
JSON line.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlathe.base.console import cell, print_table

DATA = Path(__file__).resolve().parents[1] / "data"
TILE, NEWEST = 64, 16


@dataclass
class Skipping:
    """Attention that leaves out tiles below ``limit``, and counts them by layer."""

    limit: float = math.inf
    left_out: dict[int, int] = field(default_factory=dict)
    tiles: dict[int, int] = field(default_factory=dict)

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, scaling: float, **_: object,  # noqa: ANN401
    ) -> tuple[Tensor, None]:  # fmt: skip
        """q [1, Hq, Q, d], k and v [1, H, T, d]."""
        heads, rows, tokens = k.shape[1], q.shape[2], k.shape[2]
        q = q[0].view(heads, -1, rows, q.shape[-1])
        places = torch.arange(tokens - rows, tokens)[:, None]
        seen = torch.arange(tokens) <= places
        if math.isinf(self.limit):
            group = q.shape[1]
            out = torch.nn.functional.scaled_dot_product_attention(
                q.flatten(0, 1)[None], k.repeat_interleave(group, 1),
                v.repeat_interleave(group, 1), seen, scale=scaling,
            )  # fmt: skip
            return out.transpose(1, 2), None
        scores = torch.einsum("hgqd,htd->hgqt", q, k[0]) * scaling
        scores.masked_fill_(~seen, -math.inf)
        far = self._far(scores, places, module.layer_idx).repeat_interleave(TILE, -1)
        scores.masked_fill_(far[:, None, :, :tokens], -math.inf)
        out = torch.einsum("hgqt,htd->hgqd", scores.softmax(-1), v[0])
        return out.flatten(0, 1)[None].transpose(1, 2), None

    def _far(self, scores: Tensor, places: Tensor, layer: int) -> Tensor:
        """[H, Q, tiles] of scores [H, G, Q, T]."""
        tokens = scores.shape[-1]
        tiles = -(-tokens // TILE)
        padded = torch.nn.functional.pad(
            scores, (0, tiles * TILE - tokens), value=-math.inf
        )
        most = padded.unflatten(-1, (tiles, TILE)).amax(-1)
        old = torch.arange(tokens) <= places - NEWEST
        newest = scores.masked_fill(old, -math.inf).amax(-1, keepdim=True)
        before = most.cummax(-1).values[..., :-1]
        before = torch.nn.functional.pad(before, (1, 0), value=-math.inf)
        whole = torch.arange(tiles) < places // TILE
        far = (most < torch.maximum(newest, before) - self.limit).all(1) & whole
        self.left_out[layer] = self.left_out.get(layer, 0) + int(far.sum())
        self.tiles[layer] = self.tiles.get(layer, 0) + int(whole.sum()) * len(far)
        return far

    def shares(self) -> list[float]:
        layers = sorted(self.tiles)
        return [self.left_out[i] / max(1, self.tiles[i]) for i in layers]


@contextmanager
def limited(skipping: Skipping, limit: float) -> Generator[Skipping]:
    skipping.limit = limit
    skipping.left_out, skipping.tiles = {}, {}
    yield skipping
    skipping.limit = math.inf


class Decoder:
    """A checkpoint whose attention is ``skipping``'s."""

    def __init__(self, model: Path) -> None:
        self.skipping = Skipping()
        ALL_ATTENTION_FUNCTIONS["skipping"] = self.skipping.attend
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="skipping"
        ).eval()

    @torch.no_grad()
    def prompt(self, tokens: Sequence[int]) -> DynamicCache:
        cache = DynamicCache()
        self.model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
        return cache

    @torch.no_grad()
    def logits(self, cache: DynamicCache, tokens: Sequence[int]) -> Tensor:
        """Of decoded ``tokens`` after a prompt [tokens, V]; the cache stays as it was."""
        own = copy.deepcopy(cache)
        return self.model(torch.tensor([tokens]), past_key_values=own).logits[0]


def perplexities(
    decoder: Decoder, windows: list[list[int]], scored: int, limits: list[float]
) -> list[dict[str, Any]]:
    """A row for each limit: the ratio and the shares."""
    losses = dict.fromkeys((math.inf, *limits), 0.0)
    layers = decoder.model.config.num_hidden_layers
    shares = {limit: [0.0] * layers for limit in limits}
    for tokens in windows:
        cut = len(tokens) - scored
        cache = decoder.prompt(tokens[:cut])
        for limit in losses:
            with limited(decoder.skipping, limit) as counted:
                found = decoder.logits(cache, tokens[cut:-1])
            wanted = torch.tensor(tokens[cut + 1 :])
            losses[limit] += float(torch.nn.functional.cross_entropy(found, wanted))
            for layer, share in enumerate(counted.shares()):
                shares[limit][layer] += share / len(windows)
    base = losses[math.inf]
    rows: list[dict[str, Any]] = []
    for limit in limits:
        ratio = math.exp((losses[limit] - base) / len(windows))
        rows.append({"limit": limit, "perplexity_ratio": ratio, "by_layer": shares[limit]})  # fmt: skip
    return rows


def retrieval(
    decoder: Decoder, file: Path, least: int, limits: list[float], every: int
) -> dict[float, tuple[float, float]]:
    """Limit -> the share of exact answers, and that of the tiles left out, over questions
    of ``least`` tokens or more. Infinity is no limit."""
    right = dict.fromkeys((math.inf, *limits), 0)
    left_out = dict.fromkeys(right, 0.0)
    asked = [json.loads(line) for line in file.read_text().splitlines()]
    asked = [one for one in asked if one["prompt_tokens"] >= least][::every]
    for one in asked:
        tokens = decoder.tokenizer(one["prompt"] + one["answer"])["input_ids"]
        first = len(decoder.tokenizer(one["prompt"])["input_ids"])
        cache = decoder.prompt(tokens[: first - 1])
        for limit in right:
            with limited(decoder.skipping, limit) as counted:
                found = decoder.logits(cache, tokens[first - 1 : -1]).argmax(-1)
            right[limit] += found.tolist() == tokens[first:]
            own = counted.shares()
            left_out[limit] += sum(own) / len(own) if own else 0.0
    count = len(asked)
    return {x: (right[x] / count, left_out[x] / count) for x in right}


@click.command()
@click.option("--model", type=Path, required=True)
@click.option("--text", type=Path, default=DATA / "eval_text.jsonl")
@click.option("--retrieval", "questions", type=Path, default=DATA / "line_retrieval.jsonl")  # fmt: skip
@click.option("--lengths", default="1024,2048,3840")
@click.option("--limits", default="4,5,6,7,8,10,12")
@click.option("--windows", default=8)
@click.option("--scored", default=256)
@click.option("--every", default=1, help="Of the questions of 3,000 tokens or more.")
def main(
    model: Path, text: Path, questions: Path, lengths: str, limits: str, windows: int, scored: int, every: int,
) -> None:  # fmt: skip
    decoder = Decoder(model)
    texts = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    tokens = decoder.tokenizer("\n\n".join(texts))["input_ids"]
    wanted = [float(x) for x in limits.split(",")]
    answers = retrieval(decoder, questions, 3000, wanted, every)
    results: list[dict[str, Any]] = []
    for length in map(int, lengths.split(",")):
        cut = [tokens[i * length : (i + 1) * length] for i in range(windows)]
        for row in perplexities(decoder, cut, scored, wanted):
            by_layer = row["by_layer"]
            row |= {"tokens": length, "left_out": sum(by_layer) / len(by_layer)}
            results.append(row)
    print_table(
        f"{model.name}: without a limit {answers[math.inf][0]:.2f} of the answers are exact",
        ("tokens", "limit", "left out", "by layer", "perplexity ratio"),
        [
            (
                r["tokens"], r["limit"], cell(r["left_out"]),
                " ".join(f"{x:.2f}" for x in r["by_layer"]), f"{r['perplexity_ratio']:.5f}",
            )
            for r in results
        ],
    )  # fmt: skip
    print_table(
        "Questions of 3,000 tokens or more",
        ("limit", "left out", "retrieval"),
        [(x, cell(answers[x][1]), cell(answers[x][0])) for x in wanted],
    )
    asked = {str(x): answers[x] for x in answers}
    print(json.dumps({"bench": "skip_accuracy", "model": model.name, "text": results, "retrieval": asked}))  # fmt: skip


if __name__ == "__main__":
    main()
