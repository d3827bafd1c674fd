"""UNComp, section 3: how many tokens a head and a layer keep, by the truncated matrix entropy of queries and of hidden
states.

Heads: each calibration text votes for the upper half of a layer's heads by effective rank; heads are grouped by votes,
and the group of the higher rank keeps more tokens. Layers: where the effective rank of the hidden states falls by more
than epsilon a new group begins, which fewer of a prompt's tokens enter. Removed heads take the output of the one whose
newest tokens attend most alike. Differences from the paper: a KV head stands for its query heads (mean rank), budgets
are whole pages and hold after every full page, and a budget's newest tokens are a share of it that calibration chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvlathe.errors import KvlatheError
from kvlathe.export import entropy
from kvlathe.export.methods.options import Part, known_only, unknown
from kvlathe.export.plan import ModelShape, Probe, Stage, TokenRule
from kvlathe.export.stats import Stats

SUMMARY = "keep a budget of tokens for each group of heads, fewer hidden states in later layers; calibrated on text"
CALIBRATION: Literal["random", "text"] = "text"
ORDERS = ("entropy", "reversed", "random")
PROBE = Probe(last=entropy.LAST, accumulated=False)
MOST = 1 << 30
"""Larger than any option needs to be."""


@dataclass(frozen=True, slots=True)
class Asked:
    """``budget``: tokens that heads keep on average; ``spread``: between the first and the last of ``groups`` groups.
    ``k`` as in entropy.TRUNCATIONS. ``order``: which group keeps most (the other two are the paper's ablations).
    ``recent``: share of a budget for the newest tokens, or auto. ``stages``: layer groups, or auto: by ``epsilon``;
    ``least``: tokens that enter the last one, from all that the model takes down in equal steps. ``removed``: KV heads
    removed in each layer.
    """

    budget: int = 384
    spread: int = 256
    groups: int = 2
    k: str = "32"
    order: str = "entropy"
    recent: str = "auto"
    stages: str = "auto"
    epsilon: float = 1.0
    least: int = 1536
    removed: int = 0


def read(written: Mapping[str, str]) -> Asked:
    """Raises KvlatheError for unknown options and values."""
    defaults = {name: getattr(Asked(), name) for name in Asked.__dataclass_fields__}
    found = {key: _read(key, text, defaults[key]) for key, text in known_only(dict(written), defaults).items()}
    asked = Asked(**found)
    for key, allowed in (("k", entropy.TRUNCATIONS), ("order", ORDERS)):
        if getattr(asked, key) not in allowed:
            raise unknown(f"{key} {getattr(asked, key)!r}", getattr(asked, key), allowed)
    return asked


def _read(key: str, text: str, default: object) -> Any:  # noqa: ANN401  the field's own type
    kind = {"recent": "a share", "stages": "a count"}.get(key)
    if isinstance(default, str) and (kind is None or text == "auto"):
        return text
    try:
        value = int(text) if isinstance(default, int) or key == "stages" else float(text)
    except ValueError:
        wanted = "auto or a number" if kind else "a number"
        raise KvlatheError(f"{key}={text} cannot be used", f"it is not {wanted}", f"write {key}={default}") from None
    least = {"groups": 1, "stages": 1, "budget": 1, "least": entropy.LAST + 1}.get(key, 0)
    most = 1 if key == "recent" else MOST
    if not least <= value <= most:
        raise KvlatheError(f"{key}={text} cannot be used", f"it is from {least} to {most}", f"write {key}={default}")
    return text if kind else value


def outline(written: dict[str, str], page_tokens: int) -> Part:
    """That there are budgets, and by what tokens are ranked. Raises KvlatheError for options no model can have."""
    rules = (TokenRule("budget", budget=size) for size in _budgets(read(written), page_tokens))
    return Part(tokens=tuple(rules), probe=PROBE)


def choose(stats: Stats, written: dict[str, str], page_tokens: int, seed: int) -> Part:
    """The budgets, stages and removed heads. Raises KvlatheError for options that this model cannot have."""
    asked, shape, found = read(written), stats.shape, stats.entropies
    eranks = entropy.lane_eranks(found, asked.k)
    votes = entropy.votes(eranks)
    removed = _removed(asked, shape, votes, eranks.mean(0), found.likeness.mean(0))
    recent, correlation = entropy.likest_recent(found, asked.k)
    if asked.recent != "auto":
        recent = float(asked.recent)
    budgets = _budgets(asked, page_tokens)
    groups = _groups(asked, votes, eranks.mean(0), removed, seed)
    hidden = found.hidden[..., entropy.truncation(asked.k)].mean(0)
    rules = [TokenRule("budget", budget=size, recent=round(recent * size)) for size in budgets]
    return Part(
        removed=removed,
        tokens=tuple(rules[group] for group in groups),
        probe=PROBE,
        stages=_stages(asked, hidden, shape),
        notes={
            "head_votes": votes.tolist(),
            "texts": found.texts,
            "hidden_erank": hidden.round(3).tolist(),
            "recent": recent,
            "recent_correlation": dict(zip(map(str, entropy.RECENT), np.round(correlation, 4).tolist(), strict=True)),
            "budgets": budgets,
            "calibration": stats.source,
        },
    )


# -- heads -------------------------------------------------------------------------------------------------------------
def _budgets(asked: Asked, page_tokens: int) -> list[int]:
    """Tokens of each group, falling, in whole pages."""
    ends = (asked.budget + asked.spread / 2, asked.budget - asked.spread / 2)
    sizes = np.linspace(*ends, asked.groups) if asked.groups > 1 else np.array([asked.budget])
    if sizes[-1] < page_tokens:
        raise KvlatheError(
            f"a budget of {sizes[-1]:g} tokens cannot be used",
            f"a page holds {page_tokens}",
            f"ask for budget={int(page_tokens + asked.spread / 2)} or more, or a smaller spread",
        )
    return [round(size / page_tokens) * page_tokens for size in sizes.tolist()]


def _ranking(votes: npt.NDArray[np.int64], eranks: entropy.Array) -> list[list[int]]:
    """Lanes by falling votes (equal ones by effective rank): of each layer, or of all layers where each has one."""
    layers, heads = votes.shape
    lanes = np.arange(votes.size).reshape(votes.shape if heads > 1 else (1, layers))
    keys = list(zip(votes.ravel().tolist(), eranks.ravel().tolist(), strict=True))
    return [sorted(row, key=lambda lane: keys[lane], reverse=True) for row in lanes.tolist()]


def _groups(
    asked: Asked, votes: npt.NDArray[np.int64], eranks: entropy.Array, removed: Mapping[int, int], seed: int
) -> list[int]:
    """The group of each lane; group 0 keeps most."""
    rng, group = np.random.default_rng(seed), [0] * votes.size
    for row in _ranking(votes, eranks):
        kept = [lane for lane in row if lane not in removed]
        if len(kept) < asked.groups:
            raise KvlatheError(
                f"groups={asked.groups} cannot be used", f"{len(kept)} KV heads are ranked together", "ask for fewer"
            )
        ordered = {"entropy": kept, "reversed": kept[::-1], "random": rng.permutation(kept).tolist()}[asked.order]
        for i, part in enumerate(np.array_split(ordered, asked.groups)):
            for lane in part.tolist():
                group[lane] = i
    return group


def _removed(
    asked: Asked, shape: ModelShape, votes: npt.NDArray[np.int64], eranks: entropy.Array, likeness: entropy.Array
) -> dict[int, int]:
    """Lane -> head that fills it: those of fewest votes, each from the kept head that attends most alike."""
    if asked.removed >= shape.kv_heads:
        most = shape.kv_heads - 1
        raise KvlatheError(
            f"removed={asked.removed} cannot be used", f"a layer has {shape.kv_heads} KV heads", f"ask for up to {most}"
        )
    filled: dict[int, int] = {}
    for layer, row in enumerate(_ranking(votes, eranks) if asked.removed else ()):
        heads = [lane % shape.kv_heads for lane in row]
        if asked.order == "reversed":
            heads = heads[::-1]
        kept = heads[: -asked.removed]
        for head in heads[-asked.removed :]:
            filled[layer * shape.kv_heads + head] = max(kept, key=lambda other: likeness[layer, head, other])
    return filled


# -- layers ------------------------------------------------------------------------------------------------------------
def _stages(asked: Asked, hidden: entropy.Array, shape: ModelShape) -> tuple[Stage, ...]:
    """Eqs. 11 to 13: a stage begins where the effective rank falls; sizes go down in equal steps. One stage is none."""
    if asked.stages == "auto":
        borders = entropy.drops(hidden, asked.epsilon)
    else:
        borders = _largest_drops(hidden, int(asked.stages) - 1)
    if borders and asked.stages != "auto" and asked.least >= shape.max_positions:
        raise KvlatheError(
            f"stages={asked.stages},least={asked.least} cannot be used",
            f"the model takes {shape.max_positions} tokens, so that none would leave",
            "choose a smaller least, or stages=1",
        )
    if not borders or asked.least >= shape.max_positions:
        return ()
    sizes = np.linspace(shape.max_positions, asked.least, len(borders) + 1).round().astype(int).tolist()
    return (Stage(0), *(Stage(layer, tokens) for layer, tokens in zip(borders, sizes[1:], strict=True)))


def _largest_drops(hidden: entropy.Array, count: int) -> list[int]:
    if count >= len(hidden):
        raise KvlatheError(
            f"stages={count + 1} cannot be used", f"the model has {len(hidden)} layers", "ask for one a layer at most"
        )
    falls = hidden[:-1] - hidden[1:]
    return sorted((np.argsort(-falls, kind="stable")[:count] + 1).tolist())
