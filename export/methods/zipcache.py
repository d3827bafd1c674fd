"""ZipCache (papers: arXiv 2405.14256): tokens that a few probe rows attend get ``high``
bits, the others ``low``.

Saliency is the attention that 5 % of recent and 5 % of random rows give a token,
divided by the number of those rows that see it (Eq. 8). A prompt is ranked in slices of
``slice`` tokens (0, as in the paper: whole, when it ends), later tokens a page at a time
(the paper: every 100). Each lane ranks by its
own query heads. K by ``keys``: ``channel`` as in the paper, one scale a channel and
page, or by ``token``; V by token. ``folded``: by token, its channels first scaled as in
Eq. 6, by factors from calibration that fold into the weights (channels.py).
``ends=cut`` (ours): codes of K cover the middle of a group's range; the paper's cover
all of it (``kept``). ``score=accumulated`` and the other choices of ``probe`` are the
paper's ablations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.budgets import SLICED
from kvlathe.export.methods.forms import SPAN
from kvlathe.export.methods.method import Decision, Method, Scales
from kvlathe.export.methods.options import (
    Choice,
    MethodOptions,
    Number,
    count,
    option,
)
from kvlathe.plan.formats import WHOLE_RANK, Tier
from kvlathe.plan.token_score import ObservationWindow

PROBES = {
    "mixed": (0.05, 0.05),
    "recent": (0.1, 0.0),
    "random": (0.0, 0.1),
    "all": (1.0, 0.0),
}
"""Shares of a window that are recent and random: a tenth of the rows together, or every
row."""


SCALES: dict[tuple[bool, bool], Scales] = {
    (False, False): "",
    (True, False): "k",
    (False, True): "v",
    (True, True): "kv",
}
"""By whether keys and values are folded."""


@dataclass(frozen=True)
class ZipcacheOptions(MethodOptions):
    """Two number formats, and what divides the tokens among them."""

    salient: float = option(
        0.6, Number("a share of the tokens"), "Share of the tokens in the wider format."
    )
    high: Literal[4, 8] = option(4, Choice(4, 8), "Bits of salient tokens.")
    low: Literal[2, 4] = option(2, Choice(2, 4), "Bits of the others.")
    keys: Literal["channel", "token", "folded"] = option(
        "channel",
        Choice("channel", "token", "folded"),
        "Scales of K: one a channel and page, one a token, or one a token with the "
        "channels' own factors folded into the weights.",
    )
    values: Literal["folded", "token"] = option(
        "folded", Choice("folded", "token"), "Scales of V, likewise."
    )
    ends: Literal["cut", "kept"] = option(
        "cut",
        Choice("cut", "kept"),
        "Whether codes of K cover the middle of a group's range, or all of it.",
    )
    probe: Literal["mixed", "recent", "random", "all"] = option(
        "mixed",
        Choice("mixed", "recent", "random", "all"),
        "Rows whose attention says what is salient.",
    )
    score: Literal["normalized", "accumulated"] = option(
        "normalized",
        Choice("normalized", "accumulated"),
        "Whether attention is divided by the number of rows that see a token.",
    )
    slice: int = option(1024, count("a count of tokens"), SLICED)


def plan(options: ZipcacheOptions, page_tokens: int) -> Decision:
    """Two number formats and what divides the tokens among them. Raises KvlatheError
    where salient tokens would get no more bits."""
    if options.high <= options.low:
        raise KvlatheError(
            f"high={options.high},low={options.low} contradict each other",
            "salient tokens get more bits than the others",
            "write for example high=4,low=2",
        )
    high = _tier(options.high, options, page_tokens)
    low = _tier(options.low, options, page_tokens)
    scales = SCALES[options.keys == "folded", options.values == "folded"]
    share = options.salient
    if share in (0, 1):
        return Decision(cold=high if share else low, scales=scales)
    recent, random = PROBES[options.probe]
    observation = ObservationWindow(
        recent=recent,
        random=random,
        normalized=options.score == "normalized",
        slice_tokens=options.slice,
    )
    return Decision(
        split=((high, share), (low, 1 - share)), scales=scales, score=observation
    )


def source(options: ZipcacheOptions) -> Literal["random"] | None:
    """The tokens that channels' sizes are taken from: the same as those of a method that it
    is composed with."""
    return "random" if "folded" in (options.keys, options.values) else None


def _tier(bits: Literal[2, 4, 8], options: ZipcacheOptions, page_tokens: int) -> Tier:
    span = SPAN["rank"][bits] if options.ends == "cut" else 1.0
    if options.keys == "channel":
        return Tier(bits, bits, "token", "rank", page_tokens, WHOLE_RANK, span_k=span)
    return Tier(bits, bits, "rank", "rank", WHOLE_RANK, WHOLE_RANK, span_k=span)


METHOD = Method(
    "tokens that few probe rows attend get 2 bit, the salient ones 4",
    ZipcacheOptions(),
    plan=plan,
    source=source,
)
