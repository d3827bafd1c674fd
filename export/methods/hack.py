"""HACK, sections 5 and 6: full pages are quantized once, and attention reads the codes.

A partition of numbers has a minimum and a scale. By default it is a channel of K over a
page's tokens, and a token of V over its channels, which are rotated first
(hadamard.py). So a channel that is large in every token, as a bias of the keys makes
it, costs the others nothing; nor does a token that is large in every channel.

The paper's partitions run the other way, K's along the head dim and V's along the
tokens, since a product of integers sums over those: ``arithmetic=int``, and what goes
with it. Differences from the paper are then: codes are rounded to the nearest unless
asked otherwise, Q and P are quantized symmetrically, so no sums of codes are stored
(export/attention/integer.py) unless asked for, and where a projection of K exists the
kept subspace is rotated first. The partial page of V (and of K) stays as it is computed
until it is full, in either form. docs/quantization.md has the measurements.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.method import Decision, Hadamard, Method, Source
from kvlathe.export.methods.options import (
    Choice,
    MethodOptions,
    count,
    option,
)
from kvlathe.export.methods.turns import balanced_keys
from kvlathe.plan.formats import WHOLE_RANK, Coding, Tier

Codes = Literal[2, 3, 4, 8]
Numbers = Literal[2, 3, 4, 8, 16]
CODINGS: dict[str, Coding] = {"even": "affine", "normal": "normal"}
"""Codings by the option ``levels``."""
GROUP = 64
"""Numbers that share a scale, if not a token's."""
FEW = (3, 2)
"""Bits of rotated values by token for which fixed levels are nearer than even ones."""
SPAN = 0.8
"""The part of a channel's range in a page that 4 levels cover, measured on text (forms.py
has others)."""


@dataclass(frozen=True)
class HackOptions(MethodOptions):
    """The number format of full pages."""

    bits: Codes = option(2, Choice(2, 3, 4, 8), "Bits of a code.", sizes=True)
    bits_k: Numbers | None = option(
        None, Choice(2, 3, 4, 8, 16), "Bits of K in place of bits; 16: not quantized."
    )
    bits_v: Numbers | None = option(
        None, Choice(2, 3, 4, 8, 16), "Bits of V in place of bits; 16: not quantized."
    )
    group: int | None = option(
        None,
        Choice(64, 32, 128),
        "Numbers that share a scale. [default: 64; all of a token's values in 8 bits, "
        "and of its keys where both are by token]",
    )
    levels: Literal["even", "normal"] | None = option(
        None,
        Choice("even", "normal"),
        "Even levels from a group's minimum on, or fixed ones with one scale a group, "
        "for which keys and values are by token. [default: even; normal for values by "
        "token in 3 or 2 bits, keys by channel]",
    )
    keys: Literal["channel", "token"] | None = option(
        None,
        Choice("channel", "token"),
        "Whose numbers share a scale: a channel's over a page's tokens, or a token's "
        "over its channels. [default: channel; token where that is needed: integers, "
        "fixed levels, dropped tokens]",
    )
    values: Literal["token", "channel"] | None = option(
        None,
        Choice("token", "channel"),
        "The same of V. [default: token; channel where keys are by token]",
    )
    basis: Literal["none", "balanced"] = option(
        "none",
        Choice("none", "balanced"),
        "balanced: keys in the basis that is best for what queries ask of them, "
        "calibrated on text. A projection at every step.",
    )
    sink: int | None = option(
        None,
        Choice(64, 0, 128),
        "First tokens that are not quantized, in whole pages: heads attend to them by "
        "default. None beside windows or budgets of tokens, nor in vLLM or TensorRT. "
        "[default: 64; 0 where keys are by token]",
    )
    recent: int = option(
        0,
        count("a number of tokens"),
        "Newest tokens, in whole pages, that have more bits than older ones: attention "
        "is mostly near. On a CPU (onnxruntime).",
    )
    recent_bits: Codes = option(
        4, Choice(4, 3, 8), "Bits of those, where they are more than others have."
    )
    rounding: Literal["nearest", "stochastic"] = option(
        "nearest", Choice("nearest", "stochastic"), "How numbers become codes."
    )
    arithmetic: Literal["float", "int"] | None = option(
        None,
        Choice("float", "int"),
        "Whether attention multiplies codes as integers, as in the paper (keys by "
        "token, values by channel), or dequantizes them. [default: int where it can]",
    )
    sums: Literal["none", "stored"] = option(
        "none",
        Choice("none", "stored"),
        "Whether pages hold sums of codes, for asymmetric Q and P: the paper's form.",
    )
    hadamard: Hadamard = option(
        "auto",
        Choice("auto", "none", "k", "v", "kv"),
        "Sides that are rotated first; auto: where it costs nothing.",
        also=("spin",),
    )


def plan(options: HackOptions, page_tokens: int) -> Decision:
    """The tier that full pages are sealed in. Raises KvlatheError for groups that no
    page can hold, and for options that contradict each other."""
    bits_k = options.bits_k or options.bits
    bits_v = options.bits_v or options.bits
    if bits_k == bits_v == 16:
        raise KvlatheError(
            "bits_k=16 contradicts bits_v=16",
            "nothing would be quantized",
            "give one of them 8, 4, 3 or 2",
        )
    if options.levels == "normal":
        _check_fixed(options, bits_k, bits_v, *_recent_bits(options))
    by_token = _needs_keys_by_token(options)
    if by_token and options.keys == "channel":
        raise KvlatheError(
            f"keys=channel contradicts {by_token}",
            "it needs the scales of keys to run along their channels",
            "drop one of them",
        )
    keys = options.keys or ("token" if by_token else "channel")
    sink = options.sink
    if sink is None:
        sink = 64 if keys == "channel" else 0
    cold = _tier(options, keys)
    for form in cold.formats:
        if form.along_tokens and page_tokens % form.group:
            raise KvlatheError(
                f"group={form.group} cannot be used with pages of {page_tokens} tokens",
                "groups run along a page's tokens",
                f"choose a smaller group or --tokens-per-block {form.group}",
            )
    return Decision(
        cold=cold,
        cold_of_dropped=None if options.keys else _tier(options, "token"),
        cold_of_shared=_one_form(options, keys),
        sink=sink,
        young=_young(options, keys, cold),
        recent=options.recent,
        turn=balanced_keys if options.basis == "balanced" else None,
        hadamard=options.hadamard,
    )


def _one_form(options: HackOptions, keys: Literal["channel", "token"]) -> Tier | None:
    """The tier in which V has K's form; None where the options say otherwise."""
    if options.values or options.arithmetic == "int" or options.sums == "stored":
        return None
    group = options.group or GROUP
    tier = _tier(dataclasses.replace(options, values=keys, group=group), keys)
    return dataclasses.replace(tier, span_v=tier.span_k)


def _recent_bits(options: HackOptions) -> tuple[Numbers, Numbers]:
    """Bits of K and of V of the newest tokens: at least as many as older ones have."""
    bits_k = options.bits_k or options.bits
    bits_v = options.bits_v or options.bits
    if not options.recent:
        return bits_k, bits_v
    return max(bits_k, options.recent_bits), max(bits_v, options.recent_bits)


def _young(
    options: HackOptions, keys: Literal["channel", "token"], cold: Tier
) -> Tier | None:
    """The tier of the newest tokens; None where it is that of all, ``cold``."""
    bits_k, bits_v = _recent_bits(options)
    own = dataclasses.replace(options, bits_k=bits_k, bits_v=bits_v)
    tier = _tier(own, keys)
    return None if tier == cold else tier


def source(options: HackOptions) -> Source | None:
    """The tokens that it calibrates on."""
    return "text" if options.basis == "balanced" else None


def _needs_keys_by_token(options: HackOptions) -> str:
    """The option that needs it, as it is written; empty for none."""
    if options.arithmetic == "int":
        return "arithmetic=int"
    if options.sums == "stored":
        return "sums=stored"
    return "levels=normal" if options.levels == "normal" else ""


def _tier(options: HackOptions, keys: Literal["channel", "token"]) -> Tier:
    """Raises KvlatheError for integers that nothing could multiply."""
    fixed = options.levels == "normal"
    bits_k = options.bits_k or options.bits
    bits_v = options.bits_v or options.bits
    values = options.values
    if values is None:
        values = "channel" if keys == "token" and not fixed else "token"
    nearest = options.rounding == "nearest"
    is_turned = options.hadamard not in ("none", "k")
    few = bits_v in FEW and keys == "channel" and values == "token"
    few = few and nearest and is_turned
    multiplies = keys == "token" and (values == "channel" or fixed)
    _check_products(options, multiplies)
    by_token = values == "token", keys == values == "token"
    group_v, group_k = (
        options.group or (WHOLE_RANK if whole and bits == 8 else GROUP)
        for whole, bits in zip(by_token, (bits_v, bits_k), strict=True)
    )
    return Tier(
        bits_k,
        bits_v,
        axis_k="token" if keys == "channel" else "rank",
        axis_v="token" if values == "channel" else "rank",
        group_k=group_k,
        group_v=group_v,
        arithmetic=options.arithmetic or ("int" if multiplies else "float"),
        rounding=options.rounding,
        sums=options.sums == "stored",
        span_k=SPAN if keys == "channel" and bits_k == 2 and nearest else 1.0,
        coding_k=CODINGS[options.levels or "even"],
        coding_v=CODINGS[options.levels or ("normal" if few else "even")],
    )


def _check_products(options: HackOptions, multiplies: bool) -> None:
    """Raises KvlatheError for products of integers that are not taken, and for sums that
    nothing would read. ``multiplies``: whether the partitions allow such products."""
    if options.sums == "stored" and options.arithmetic == "float":
        raise KvlatheError(
            "sums=stored contradicts arithmetic=float",
            "only products of integers read the sums",
            "drop one of them",
        )
    asks = options.arithmetic == "int" or options.sums == "stored"
    if asks and not multiplies:
        raise KvlatheError(
            "values=token contradicts arithmetic=int and sums=stored",
            "a product of integers sums over tokens, which then have a scale each",
            "leave values out",
        )


def _check_fixed(options: HackOptions, *bits: int) -> None:
    """Raises KvlatheError for what fixed levels cannot be composed with."""
    if 8 in bits:
        raise KvlatheError(
            "levels=normal contradicts bits=8",
            "the tables are for 4, 3 and 2 bits",
            "choose fewer bits, or levels=even",
        )
    if options.values == "channel":
        raise KvlatheError(
            "levels=normal contradicts values=channel",
            "its scales run along the channels of a token",
            "leave values out",
        )
    if options.sums == "stored" or options.rounding != "nearest":
        raise KvlatheError(
            "levels=normal contradicts sums=stored and rounding=stochastic",
            "its codes are the nearest, and nothing reads their sums",
            "leave both out",
        )


METHOD = Method(
    "quantize full pages to 8, 4, 3 or 2 bit and compute on the codes",
    HackOptions(),
    plan=plan,
    source=source,
)
