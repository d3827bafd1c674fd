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

from typing import Any, Literal

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.budgets import sliced
from kvlathe.export.methods.forms import SPAN
from kvlathe.export.methods.options import Decision, chosen
from kvlathe.plan.formats import WHOLE_RANK, Tier
from kvlathe.plan.observation import ObservationWindow

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
SLICE = 1024
"""Tokens of a prompt that are ranked together: more are not hot at once."""
PROBES = {
    "mixed": (0.05, 0.05),
    "recent": (0.1, 0.0),
    "random": (0.0, 0.1),
    "all": (1.0, 0.0),
}
"""Shares of a window that are recent and random: a tenth of the rows together, or every
row."""


def plan(written: dict[str, str], page_tokens: int) -> Decision:
    """Two number formats and what divides the tokens among them. Raises KvlatheError
    for unknown options."""
    share = _share(written.get("salient", str(SALIENT)))
    settings = _settings(written)
    if settings["high"] <= settings["low"]:
        raise KvlatheError(
            f"high={settings['high']},low={settings['low']} contradict each other",
            "salient tokens get more bits than the others",
            "write for example high=4,low=2",
        )
    high = _tier(settings["high"], settings, page_tokens)
    low = _tier(settings["low"], settings, page_tokens)
    scale_k = settings["keys"] == "folded"
    scale_v = settings["values"] == "folded"
    scales: Any = "k" * scale_k + "v" * scale_v
    if share in (0, 1):
        return Decision(cold=high if share else low, scales=scales)
    recent, random = PROBES[settings["probe"]]
    observation = ObservationWindow(
        recent=recent, random=random, normalized=settings["score"] == "normalized"
    )
    return Decision(
        split=((high, share), (low, 1 - share)),
        scales=scales,
        observation=sliced(observation, written, SLICE),
    )


def source(written: dict[str, str]) -> Literal["random"] | None:
    """What channels' sizes are taken from: the same tokens as those of a method that it
    is composed with."""
    settings = _settings(written)
    return "random" if "folded" in (settings["keys"], settings["values"]) else None


def _settings(written: dict[str, str]) -> dict[str, Any]:
    """Every option but the share of salient tokens."""
    return chosen(
        {k: text for k, text in written.items() if k not in ("salient", "slice")},
        {**CHOICES, "salient": (SALIENT,), "slice": (SLICE,)},
    )


def _tier(bits: Any, settings: dict[str, Any], page_tokens: int) -> Tier:  # noqa: ANN401 (2, 4 or 8)
    span = SPAN["rank"][bits] if settings["ends"] == "cut" else 1.0
    if settings["keys"] == "channel":
        return Tier(bits, bits, "token", "rank", page_tokens, WHOLE_RANK, span_k=span)
    return Tier(bits, bits, "rank", "rank", WHOLE_RANK, WHOLE_RANK, span_k=span)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise KvlatheError(
            f"salient={text} cannot be used",
            "it is a share of the tokens",
            "write salient=0.6",
        )
    return share


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
