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
from typing import Literal, NoReturn

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration import effective_ranks
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.budgets import SLICED
from kvlathe.export.methods.method import Decision, Method
from kvlathe.export.methods.options import (
    MOST,
    Choice,
    MethodOptions,
    Number,
    count,
    option,
)
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.lives import Budget
from kvlathe.plan.stages import Stage
from kvlathe.plan.token_score import ObservationWindow


@dataclass(frozen=True)
class UncompOptions(MethodOptions):
    """The tokens that heads and layers keep. ``k`` as in effective_ranks.TRUNCATIONS."""

    budget: int = option(
        384, count("a count of tokens", 1), "Tokens that heads keep on average."
    )
    spread: int = option(
        256,
        count("a count of tokens"),
        "Tokens between the budgets of the first and the last group.",
    )
    groups: int = option(2, count("a count of groups", 1), "Groups of heads.")
    k: str = option(
        "32",
        Choice(*effective_ranks.TRUNCATIONS),
        "Eigenvalues that an effective rank is taken of.",
    )
    order: Literal["entropy", "reversed", "random"] = option(
        "entropy",
        Choice("entropy", "reversed", "random"),
        "Which group keeps most; the last two are the paper's ablations.",
    )
    recent: float | Literal["auto"] = option(
        "auto",
        Number("a share of the budget", words=("auto",)),
        "Share of a budget for the newest tokens; auto: by calibration.",
    )
    stages: int | Literal["auto"] = option(
        "auto",
        Number("a count of stages", 1, MOST, whole=True, words=("auto",)),
        "Groups of layers; auto: by epsilon.",
    )
    epsilon: float = option(
        1.0,
        Number("a difference of effective ranks", 0, MOST),
        "Fall of the effective rank at which a group of layers begins.",
    )
    least: int = option(
        1536,
        count("a count of tokens", effective_ranks.LAST + 1),
        "Tokens of a prompt that enter the last group of layers.",
    )
    removed: int = option(
        0, count("a count of heads"), "KV heads removed in each layer."
    )
    slice: int = option(1024, count("a count of tokens"), SLICED)


def observation_of(options: UncompOptions) -> ObservationWindow:
    """The rows that tokens are ranked by."""
    return ObservationWindow(
        last=effective_ranks.LAST, accumulated=False, slice_tokens=options.slice
    )


def outline(options: UncompOptions, page_tokens: int) -> Decision:
    """That there are budgets, and by what tokens are ranked. Raises KvlatheError for
    options no model can have."""
    lives = tuple(Budget(size) for size in _budgets(options, page_tokens))
    return Decision(tokens=lives, score=observation_of(options))


def check(options: UncompOptions, shape: ModelShape) -> None:
    """Raise KvlatheError for options that no model of this ``shape`` can have, before
    anything is calibrated."""
    if not shape.alike:
        raise KvlatheError(
            "uncomp cannot be used with this model",
            "its layers have heads of unlike shapes, or share caches, and their "
            "effective ranks are compared",
            "choose another method",
        )
    _check_removed(options, shape)
    heads = shape.kv_heads - options.removed
    _check_groups(options, heads if shape.kv_heads > 1 else shape.layers)
    if options.stages == "auto":
        return
    stages = options.stages
    if stages > shape.layers:
        raise KvlatheError(
            f"stages={stages} cannot be used",
            f"the model has {shape.layers} layers",
            "ask for one a layer at most",
        )
    if stages > 1 and options.least >= shape.max_positions:
        raise KvlatheError(
            f"stages={stages},least={options.least} cannot be used",
            f"the model takes {shape.max_positions} tokens, so that none would leave",
            "choose a smaller least, or stages=1",
        )


def _check_removed(options: UncompOptions, shape: ModelShape) -> None:
    if options.removed >= shape.kv_heads:
        raise KvlatheError(
            f"removed={options.removed} cannot be used",
            f"a layer has {shape.kv_heads} KV heads",
            f"ask for up to {shape.kv_heads - 1}",
        )


def _check_groups(options: UncompOptions, ranked_together: int) -> None:
    if ranked_together < options.groups:
        raise KvlatheError(
            f"groups={options.groups} cannot be used",
            f"{ranked_together} KV heads are ranked together",
            "ask for fewer",
        )


def choose(
    stats: Stats, options: UncompOptions, page_tokens: int, seed: int
) -> Decision:
    """The budgets, stages and removed heads. Raises KvlatheError for options that this
    model cannot have."""
    shape = stats.shape
    entropies = stats.entropies
    check(options, shape)
    if not entropies.texts:
        raise KvlatheError(
            "the statistics hold no entropies",
            "they were taken for a method that reads none",
            "calibrate for this one",
        )
    eranks = effective_ranks.lane_eranks(entropies, options.k)
    mean_eranks = eranks.mean(0)
    votes = effective_ranks.votes(eranks)
    removed = _removed(options, shape, votes, mean_eranks, entropies.likeness.mean(0))
    recent, correlation = effective_ranks.likest_recent(entropies, options.k)
    if options.recent != "auto":
        recent = options.recent
    budgets = _budgets(options, page_tokens)
    groups = _groups(options, votes, mean_eranks, removed, seed)
    hidden = entropies.hidden[..., effective_ranks.truncation(options.k)].mean(0)
    lives = [Budget(size, recent=round(recent * size)) for size in budgets]
    return Decision(
        removed=removed,
        tokens=tuple(lives[group] for group in groups),
        score=observation_of(options),
        stages=_stages(options, hidden, shape),
        notes={
            "head_votes": votes.tolist(),
            "texts": entropies.texts,
            "hidden_erank": hidden.round(3).tolist(),
            "recent": recent,
            "recent_correlation": dict(
                zip(
                    map(str, effective_ranks.RECENT),
                    np.round(correlation, 4).tolist(),
                    strict=True,
                )
            ),
            "budgets": budgets,
            "calibration": stats.source,
        },
    )


# -- heads -----------------------------------------------------------------------------
def _budgets(options: UncompOptions, page_tokens: int) -> list[int]:
    """Tokens of each group, falling, in whole pages."""
    ends = (
        options.budget + options.spread / 2,
        options.budget - options.spread / 2,
    )
    sizes = (
        np.linspace(*ends, options.groups)
        if options.groups > 1
        else np.array([options.budget])
    )
    if sizes[-1] < page_tokens:
        _refuse_small(options, sizes, page_tokens)
    return [round(size / page_tokens) * page_tokens for size in sizes.tolist()]


def _refuse_small(
    options: UncompOptions, sizes: npt.NDArray[np.floating], page_tokens: int
) -> NoReturn:
    """The last group's budget is less than a page."""
    given = f"budget={options.budget}"
    if options.groups > 1:
        given += f",spread={options.spread},groups={options.groups}"
    fact = f"{given} cannot be used"
    shares = " and ".join(f"{size:g}" for size in (sizes[0], sizes[-1]))
    reason = (
        f"the last group would keep {sizes[-1]:g} tokens and a page holds {page_tokens}"
    )
    if options.groups > 1:
        reason += f" (the first and the last group keep {shares})"
    least = math.ceil(page_tokens + options.spread / 2)
    remedy = f"ask for budget={least} or more"
    smaller = math.floor(2 * (options.budget - page_tokens))
    if options.groups == 1:
        remedy = f"ask for budget={page_tokens} or more"
    elif smaller >= 0:
        remedy += f", or for spread={smaller} or less"
    raise KvlatheError(fact, reason, remedy)


def _ranking(
    votes: npt.NDArray[np.int64], eranks: effective_ranks.Array
) -> list[list[int]]:
    """Lanes by falling votes (equal ones by effective rank): of each layer, or of all
    layers where each has one."""
    layers, heads = votes.shape
    lanes = np.arange(votes.size).reshape(votes.shape if heads > 1 else (1, layers))
    keys = list(zip(votes.ravel().tolist(), eranks.ravel().tolist(), strict=True))
    return [
        sorted(row, key=lambda lane: keys[lane], reverse=True) for row in lanes.tolist()
    ]


def _groups(
    options: UncompOptions,
    votes: npt.NDArray[np.int64],
    eranks: effective_ranks.Array,
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
        }[options.order]
        for i, part in enumerate(np.array_split(ordered, options.groups)):
            for lane in part.tolist():
                group[lane] = i
    return group


def _removed(
    options: UncompOptions,
    shape: ModelShape,
    votes: npt.NDArray[np.int64],
    eranks: effective_ranks.Array,
    likeness: effective_ranks.Array,
) -> dict[int, int]:
    """Lane -> head that fills it: those of fewest votes, each from the kept head that
    attends most alike."""
    filled: dict[int, int] = {}
    for layer, row in enumerate(_ranking(votes, eranks) if options.removed else ()):
        heads = [lane % shape.kv_heads for lane in row]
        if options.order == "reversed":
            heads = heads[::-1]
        kept = heads[: -options.removed]
        for head in heads[-options.removed :]:
            filled[layer * shape.kv_heads + head] = max(
                kept, key=lambda other: likeness[layer, head, other]
            )
    return filled


# -- layers ----------------------------------------------------------------------------
def _stages(
    options: UncompOptions, hidden: effective_ranks.Array, shape: ModelShape
) -> tuple[Stage, ...]:
    """Eqs. 11 to 13: a stage begins where the effective rank falls; sizes go down in
    equal steps. One stage is none."""
    if options.stages == "auto":
        borders = effective_ranks.drops(hidden, options.epsilon)
    else:
        borders = _largest_drops(hidden, options.stages - 1)
    if not borders or options.least >= shape.max_positions:
        return ()
    sizes = (
        np.linspace(shape.max_positions, options.least, len(borders) + 1)
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


def _largest_drops(hidden: effective_ranks.Array, count: int) -> list[int]:
    rises = hidden[1:] - hidden[:-1]
    largest = np.argsort(rises, kind="stable")[:count]
    return sorted((largest + 1).tolist())


METHOD = Method(
    "keep a budget of tokens for each group of heads, fewer hidden states in later "
    "layers; calibrated on text",
    UncompOptions(),
    plan=outline,
    choose=choose,
    check=check,
    calibration="text",
    entropies=True,
)
