"""UNComp, section 3: how many tokens a head and a layer keep, by the truncated matrix
entropy of queries and of hidden states.

Heads: each calibration text votes for the upper half of a layer's heads by effective
rank; heads are grouped by votes, and the group of the higher rank keeps more tokens.
Layers: where the effective rank of the hidden states falls by more than epsilon a new
group begins, which fewer of a prompt's tokens enter. Removed heads take the output of
the one whose newest tokens attend most alike. Differences from the paper: a KV head
stands for its query heads (mean rank), budgets are whole pages and hold after every
full page, and a budget's newest tokens are a share of it that calibration chose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration import entropy
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.budgets import sliced
from kvlathe.export.methods.options import Decision, known_only, unknown
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.lives import Budget
from kvlathe.plan.observation import ObservationWindow
from kvlathe.plan.stages import Stage

SUMMARY = "keep a budget of tokens for each group of heads, fewer hidden states in later layers; calibrated on text"
CALIBRATION: Literal["random", "text"] = "text"
ORDERS = ("entropy", "reversed", "random")
OBSERVATION = ObservationWindow(last=entropy.LAST, accumulated=False)
SLICE = 1024
"""Tokens of a prompt that are ranked together."""
MOST = 1 << 30
"""Larger than any option needs to be."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``budget``: tokens that heads keep on average; ``spread``: between the first and
    the last of ``groups`` groups. ``k`` as in entropy.TRUNCATIONS. ``order``: which
    group keeps most (the other two are the paper's ablations).
    ``recent``: share of a budget for the newest tokens, or auto. ``stages``: layer
    groups, or auto: by ``epsilon``;
    ``least``: tokens that enter the last one, from all that the model takes down in
    equal steps. ``removed``: KV heads removed in each layer. ``slice``: tokens of a
    prompt that are ranked together where there is one stage (0: all).
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
    slice: int = SLICE


def read(written: Mapping[str, str]) -> Settings:
    """Raises KvlatheError for unknown options and values."""
    defaults = {
        name: getattr(Settings(), name) for name in Settings.__dataclass_fields__
    }
    values = {
        key: _read(key, text, defaults[key])
        for key, text in known_only(dict(written), defaults).items()
    }
    settings = Settings(**values)
    for key, allowed in (("k", entropy.TRUNCATIONS), ("order", ORDERS)):
        if getattr(settings, key) not in allowed:
            raise unknown(
                f"{key} {getattr(settings, key)!r}", getattr(settings, key), allowed
            )
    return settings


def _read(key: str, text: str, default: object) -> Any:  # noqa: ANN401  the field's own type
    kind = {"recent": "a share", "stages": "a count"}.get(key)
    if isinstance(default, str) and (kind is None or text == "auto"):
        return text
    try:
        value = (
            int(text) if isinstance(default, int) or key == "stages" else float(text)
        )
    except ValueError:
        wanted = "auto or a number" if kind else "a number"
        raise KvlatheError(
            f"{key}={text} cannot be used",
            f"it is not {wanted}",
            f"write {key}={default}",
        ) from None
    least = {"groups": 1, "stages": 1, "budget": 1, "least": entropy.LAST + 1}.get(
        key, 0
    )
    most = 1 if key == "recent" else MOST
    if not least <= value <= most:
        raise KvlatheError(
            f"{key}={text} cannot be used",
            f"it is from {least} to {most}",
            f"write {key}={default}",
        )
    return text if kind else value


def outline(written: dict[str, str], page_tokens: int) -> Decision:
    """That there are budgets, and by what tokens are ranked. Raises KvlatheError for
    options no model can have."""
    lives = (Budget(size) for size in _budgets(read(written), page_tokens))
    observation = sliced(OBSERVATION, written, SLICE)
    return Decision(tokens=tuple(lives), observation=observation)


def check(written: dict[str, str], shape: ModelShape) -> None:
    """Raise KvlatheError for options that no model of this ``shape`` can have, before
    anything is calibrated."""
    settings = read(written)
    _check_removed(settings, shape)
    heads = shape.kv_heads - settings.removed
    _check_groups(settings, heads if shape.kv_heads > 1 else shape.layers)
    if settings.stages == "auto":
        return
    stages = int(settings.stages)
    if stages > shape.layers:
        raise KvlatheError(
            f"stages={stages} cannot be used",
            f"the model has {shape.layers} layers",
            "ask for one a layer at most",
        )
    if stages > 1 and settings.least >= shape.max_positions:
        raise KvlatheError(
            f"stages={stages},least={settings.least} cannot be used",
            f"the model takes {shape.max_positions} tokens, so that none would leave",
            "choose a smaller least, or stages=1",
        )


def _check_removed(settings: Settings, shape: ModelShape) -> None:
    if settings.removed >= shape.kv_heads:
        raise KvlatheError(
            f"removed={settings.removed} cannot be used",
            f"a layer has {shape.kv_heads} KV heads",
            f"ask for up to {shape.kv_heads - 1}",
        )


def _check_groups(settings: Settings, ranked_together: int) -> None:
    if ranked_together < settings.groups:
        raise KvlatheError(
            f"groups={settings.groups} cannot be used",
            f"{ranked_together} KV heads are ranked together",
            "ask for fewer",
        )


def choose(
    stats: Stats, written: dict[str, str], page_tokens: int, seed: int
) -> Decision:
    """The budgets, stages and removed heads. Raises KvlatheError for options that this
    model cannot have."""
    settings = read(written)
    shape = stats.shape
    entropies = stats.entropies
    check(written, shape)
    if not entropies.texts:
        raise KvlatheError(
            "the statistics hold no entropies",
            "they were taken for a method that reads none",
            "calibrate for this one",
        )
    eranks = entropy.lane_eranks(entropies, settings.k)
    mean_eranks = eranks.mean(0)
    votes = entropy.votes(eranks)
    likeness = entropies.likeness.mean(0)
    removed = _removed(settings, shape, votes, mean_eranks, likeness)
    recent, correlation = entropy.likest_recent(entropies, settings.k)
    if settings.recent != "auto":
        recent = float(settings.recent)
    budgets = _budgets(settings, page_tokens)
    groups = _groups(settings, votes, mean_eranks, removed, seed)
    hidden = entropies.hidden[..., entropy.truncation(settings.k)].mean(0)
    lives = [Budget(size, recent=round(recent * size)) for size in budgets]
    return Decision(
        removed=removed,
        tokens=tuple(lives[group] for group in groups),
        observation=sliced(OBSERVATION, written, settings.slice),
        stages=_stages(settings, hidden, shape),
        notes={
            "head_votes": votes.tolist(),
            "texts": entropies.texts,
            "hidden_erank": hidden.round(3).tolist(),
            "recent": recent,
            "recent_correlation": dict(
                zip(
                    map(str, entropy.RECENT),
                    np.round(correlation, 4).tolist(),
                    strict=True,
                )
            ),
            "budgets": budgets,
            "calibration": stats.source,
        },
    )


# -- heads -----------------------------------------------------------------------------
def _budgets(settings: Settings, page_tokens: int) -> list[int]:
    """Tokens of each group, falling, in whole pages."""
    ends = (
        settings.budget + settings.spread / 2,
        settings.budget - settings.spread / 2,
    )
    sizes = (
        np.linspace(*ends, settings.groups)
        if settings.groups > 1
        else np.array([settings.budget])
    )
    if sizes[-1] < page_tokens:
        _refuse_small(settings, sizes, page_tokens)
    return [round(size / page_tokens) * page_tokens for size in sizes.tolist()]


def _refuse_small(
    settings: Settings, sizes: npt.NDArray[np.floating], page_tokens: int
) -> NoReturn:
    """The last group's budget is less than a page."""
    given = f"budget={settings.budget}"
    if settings.groups > 1:
        given += f",spread={settings.spread},groups={settings.groups}"
    fact = f"{given} cannot be used"
    shares = " and ".join(f"{size:g}" for size in (sizes[0], sizes[-1]))
    reason = (
        f"the last group would keep {sizes[-1]:g} tokens and a page holds {page_tokens}"
    )
    if settings.groups > 1:
        reason += f" (the first and the last group keep {shares})"
    least = math.ceil(page_tokens + settings.spread / 2)
    remedy = f"ask for budget={least} or more"
    smaller = math.floor(2 * (settings.budget - page_tokens))
    if settings.groups == 1:
        remedy = f"ask for budget={page_tokens} or more"
    elif smaller >= 0:
        remedy += f", or for spread={smaller} or less"
    raise KvlatheError(fact, reason, remedy)


def _ranking(votes: npt.NDArray[np.int64], eranks: entropy.Array) -> list[list[int]]:
    """Lanes by falling votes (equal ones by effective rank): of each layer, or of all
    layers where each has one."""
    layers, heads = votes.shape
    lanes = np.arange(votes.size).reshape(votes.shape if heads > 1 else (1, layers))
    keys = list(zip(votes.ravel().tolist(), eranks.ravel().tolist(), strict=True))
    return [
        sorted(row, key=lambda lane: keys[lane], reverse=True) for row in lanes.tolist()
    ]


def _groups(
    settings: Settings,
    votes: npt.NDArray[np.int64],
    eranks: entropy.Array,
    removed: Mapping[int, int],
    seed: int,
) -> list[int]:
    """The group of each lane; group 0 keeps most."""
    rng, group = np.random.default_rng(seed), [0] * votes.size
    for row in _ranking(votes, eranks):
        kept = [lane for lane in row if lane not in removed]
        ordered = {
            "entropy": kept,
            "reversed": kept[::-1],
            "random": rng.permutation(kept).tolist(),
        }[settings.order]
        for i, part in enumerate(np.array_split(ordered, settings.groups)):
            for lane in part.tolist():
                group[lane] = i
    return group


def _removed(
    settings: Settings,
    shape: ModelShape,
    votes: npt.NDArray[np.int64],
    eranks: entropy.Array,
    likeness: entropy.Array,
) -> dict[int, int]:
    """Lane -> head that fills it: those of fewest votes, each from the kept head that
    attends most alike."""
    filled: dict[int, int] = {}
    for layer, row in enumerate(_ranking(votes, eranks) if settings.removed else ()):
        heads = [lane % shape.kv_heads for lane in row]
        if settings.order == "reversed":
            heads = heads[::-1]
        kept = heads[: -settings.removed]
        for head in heads[-settings.removed :]:
            filled[layer * shape.kv_heads + head] = max(
                kept, key=lambda other: likeness[layer, head, other]
            )
    return filled


# -- layers ----------------------------------------------------------------------------
def _stages(
    settings: Settings, hidden: entropy.Array, shape: ModelShape
) -> tuple[Stage, ...]:
    """Eqs. 11 to 13: a stage begins where the effective rank falls; sizes go down in
    equal steps. One stage is none."""
    if settings.stages == "auto":
        borders = entropy.drops(hidden, settings.epsilon)
    else:
        borders = _largest_drops(hidden, int(settings.stages) - 1)
    if not borders or settings.least >= shape.max_positions:
        return ()
    sizes = (
        np.linspace(shape.max_positions, settings.least, len(borders) + 1)
        .round()
        .astype(int)
        .tolist()
    )
    return (
        Stage(0),
        *(
            Stage(layer, tokens)
            for layer, tokens in zip(borders, sizes[1:], strict=True)
        ),
    )


def _largest_drops(hidden: entropy.Array, count: int) -> list[int]:
    falls = hidden[:-1] - hidden[1:]
    largest = np.argsort(-falls, kind="stable")[:count]
    return sorted((largest + 1).tolist())
