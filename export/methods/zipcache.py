"""ZipCache (papers: arXiv 2405.14256): tokens that a few probe rows attend get ``high`` bits, the others ``low``.

Saliency is the attention that 5 % of recent and 5 % of random rows give a token, divided by the number of those rows
that see it (Eq. 8); a prompt is ranked once, when it ends, later tokens a page at a time (the paper: every 100). Each
lane ranks by its own query heads. K by ``keys``: ``channel`` as in the paper, one scale a channel and page, or
``token``; V by token. ``score=accumulated`` and the other choices of ``probe`` are the paper's ablations.
"""

from __future__ import annotations

from typing import Any

from kvlathe.errors import KvlatheError
from kvlathe.export.methods.options import Part, chosen
from kvlathe.export.plan import Probe, Tier

SUMMARY = "tokens that few probe rows attend get 2 bit, the salient ones 4"
CHOICES: dict[str, tuple[Any, ...]] = {
    "high": (4, 8),
    "low": (2, 4),
    "keys": ("channel", "token"),
    "probe": ("mixed", "recent", "random"),
    "score": ("normalized", "accumulated"),
}
SALIENT = 0.6
PROBES = {"mixed": (0.05, 0.05), "recent": (0.1, 0.0), "random": (0.0, 0.1)}
"""Shares of a window that are recent and random: a tenth of the rows together."""
WHOLE = 1 << 16
"""Channels of a group: all that a lane has."""


def plan(written: dict[str, str], page_tokens: int) -> Part:
    """Two number formats and what divides the tokens among them. Raises KvlatheError for unknown options."""
    share = _share(written.get("salient", str(SALIENT)))
    asked = chosen({key: text for key, text in written.items() if key != "salient"}, {**CHOICES, "salient": (SALIENT,)})
    high, low = (_tier(asked[name], asked["keys"], page_tokens) for name in ("high", "low"))
    if asked["high"] <= asked["low"]:
        raise KvlatheError(
            f"high={asked['high']},low={asked['low']} contradict each other",
            "salient tokens get more bits than the others",
            "write for example high=4,low=2",
        )
    if share in (0, 1):
        return Part(cold=high if share else low)
    recent, random = PROBES[asked["probe"]]
    probe = Probe(recent=recent, random=random, normalized=asked["score"] == "normalized")
    return Part(split=((high, share), (low, 1 - share)), probe=probe)


def _tier(bits: Any, keys: str, page_tokens: int) -> Tier:  # noqa: ANN401 (2, 4 or 8)
    return Tier(bits, bits, keys_axis(keys), "rank", page_tokens if keys == "channel" else WHOLE, WHOLE)


def keys_axis(keys: str) -> Any:  # noqa: ANN401 (a literal of Tier)
    return "token" if keys == "channel" else "rank"


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise KvlatheError(f"salient={text} cannot be used", "it is a share of the tokens", "write salient=0.6")
    return share


def ratio(scheme: str, batch: int, width: int, tokens: int, bits: int = 4, group: int = 32) -> float:
    """The paper's compression ratios (section 3): 16-bit K and V of ``batch`` x ``tokens`` x ``width`` over codes and
    16-bit scales and zeros. ``scheme``: groupwise, tokenwise, or separable (K by channel, V by token and channel)."""
    values = batch * width * tokens
    parameters = {
        "groupwise": 4 * values / group,
        "tokenwise": 4 * batch * tokens,
        "separable": 3 * width + 2 * batch * tokens,
    }
    return 32 * values / (2 * bits * values + 16 * parameters[scheme])
