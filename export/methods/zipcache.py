"""ZipCache (papers: arXiv 2405.14256): tokens that a few probe rows attend get ``high`` bits, the others ``low``.

Saliency is the attention that 5 % of recent and 5 % of random rows give a token, divided by the number of those rows
that see it (Eq. 8); a prompt is ranked once, when it ends, later tokens a page at a time (the paper: every 100). Each
lane ranks by its own query heads. K by ``keys``: ``channel`` as in the paper, one scale a channel and page, or by
``token``; V by token. ``folded``: by token, its channels first scaled as in Eq. 6, by factors from calibration that
fold into the weights (channels.py). ``ends=cut`` (ours): codes of K cover the middle of a group's range; the paper's
cover all of it (``kept``). ``score=accumulated`` and the other choices of ``probe`` are the paper's ablations.
"""

from __future__ import annotations

from typing import Any, Literal

from kvlathe.errors import KvlatheError
from kvlathe.export.methods.auto import SPAN
from kvlathe.export.methods.options import Part, chosen
from kvlathe.export.plan import Probe, Tier

SUMMARY = "tokens that few probe rows attend get 2 bit, the salient ones 4"
CHOICES: dict[str, tuple[Any, ...]] = {
    "high": (4, 8),
    "low": (2, 4),
    "keys": ("channel", "token", "folded"),
    "values": ("folded", "token"),
    "ends": ("cut", "kept"),
    "probe": ("mixed", "recent", "random", "all"),
    "score": ("normalized", "accumulated"),
}
SALIENT = 0.6
PROBES = {"mixed": (0.05, 0.05), "recent": (0.1, 0.0), "random": (0.0, 0.1), "all": (1.0, 0.0)}
"""Shares of a window that are recent and random: a tenth of the rows together, or every row."""
WHOLE = 1 << 16
"""Channels of a group: all that a lane has."""


def plan(written: dict[str, str], page_tokens: int) -> Part:
    """Two number formats and what divides the tokens among them. Raises KvlatheError for unknown options."""
    share, asked = _share(written.get("salient", str(SALIENT))), _asked(written)
    if asked["high"] <= asked["low"]:
        raise KvlatheError(
            f"high={asked['high']},low={asked['low']} contradict each other",
            "salient tokens get more bits than the others",
            "write for example high=4,low=2",
        )
    high, low = (_tier(asked[name], asked, page_tokens) for name in ("high", "low"))
    scales: Any = "".join(side for side, of in (("k", "keys"), ("v", "values")) if asked[of] == "folded")
    if share in (0, 1):
        return Part(cold=high if share else low, scales=scales)
    recent, random = PROBES[asked["probe"]]
    probe = Probe(recent=recent, random=random, normalized=asked["score"] == "normalized")
    return Part(split=((high, share), (low, 1 - share)), scales=scales, probe=probe)


def source(written: dict[str, str]) -> Literal["random"] | None:
    """What channels' sizes are taken from: the same tokens as those of a method that it is composed with."""
    asked = _asked(written)
    return "random" if "folded" in (asked["keys"], asked["values"]) else None


def _asked(written: dict[str, str]) -> dict[str, Any]:
    """Every option but the share of salient tokens."""
    return chosen({key: text for key, text in written.items() if key != "salient"}, {**CHOICES, "salient": (SALIENT,)})


def _tier(bits: Any, asked: dict[str, Any], page_tokens: int) -> Tier:  # noqa: ANN401 (2, 4 or 8)
    span = SPAN["rank"][bits] if asked["ends"] == "cut" else 1.0
    if asked["keys"] == "channel":
        return Tier(bits, bits, "token", "rank", page_tokens, WHOLE, span_k=span)
    return Tier(bits, bits, "rank", "rank", WHOLE, WHOLE, span_k=span)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise KvlatheError(f"salient={text} cannot be used", "it is a share of the tokens", "write salient=0.6")
    return share


def ratio(scheme: str, batch: int, width: int, tokens: int, bits: float = 4, group: int = 32) -> float:
    """The paper's compression ratios (section 3): 16-bit K and V of ``batch`` x ``tokens`` x ``width`` over codes and
    16-bit scales and zeros. ``scheme``: groupwise, tokenwise, or separable (K by channel, V by token and channel)."""
    values = batch * width * tokens
    parameters = {
        "groupwise": 4 * values / group,
        "tokenwise": 4 * batch * tokens,
        "separable": 3 * width + 2 * batch * tokens,
    }
    return 32 * values / (2 * bits * values + 16 * parameters[scheme])
