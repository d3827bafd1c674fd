"""Rope: a model's rotary positions as data: a frequency and an amplitude for each
plane, and where a plane's dims lie.

Canonical order of a head's d dims: plane j is the pair (j, j + d/2), for all d/2
planes. A model that turns only the first ``rotary_dim`` dims of a head keeps them as
its first planes; the other dims become planes of frequency 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlathe.base.errors import KvlatheError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

SUPPORTED = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """``inv_freq`` [d/2] radians a token; ``amplitude`` [d/2] multiplies cos and sin
    (YaRN, LongRoPE; 1 elsewhere)."""

    inv_freq: tuple[float, ...]
    amplitude: tuple[float, ...]
    rotary_dim: int
    short_length: int | None = None
    """LongRoPE: transformers turns sequences of up to this many tokens by other factors
    than these. None where these are right for every sequence that is served."""

    @property
    def order(self) -> list[int]:
        """[d]: canonical dim c is the checkpoint's dim order[c]."""
        half = self.rotary_dim // 2
        unturned = len(self.inv_freq) - half
        middle = self.rotary_dim + unturned
        first = [*range(half), *range(self.rotary_dim, middle)]
        second = [*range(half, self.rotary_dim), *range(middle, middle + unturned)]
        return first + second


def read_rope(
    config: PreTrainedConfig, head_dim: int, max_seq_len: int, partial: bool
) -> Rope:
    """The rotation that transformers applies to sequences of up to ``max_seq_len``
    tokens.

    transformers chooses LongRoPE's short or long factors by the length of the sequence
    at hand. Cached keys cannot turn again when a sequence grows, so they are chosen
    here once, by ``max_seq_len``; ``short_length`` says where that differs.
    Dynamic NTK scaling changes nothing up to the model's own length.
    Raises KvlatheError for other kinds of scaling, RoPE by layer, and a partial
    rotation where ``partial`` is false.
    """
    parameters = config.rope_parameters or {}
    kind = parameters.get("rope_type")
    if kind not in SUPPORTED:
        raise KvlatheError(
            f"the RoPE type {kind!r} is not supported",
            "",
            f"choose a model with one of {', '.join(SUPPORTED)}, the same in all layers",
        )
    if not partial and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise KvlatheError(
            "config.json sets partial_rotary_factor",
            f"{config.model_type} turns whole heads",
            "correct config.json",
        )
    try:
        rotated, scale = _inverse_frequencies(config, parameters, head_dim, max_seq_len)
        short_length = _short_length(config, parameters, head_dim, max_seq_len)
    except (KeyError, TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise KvlatheError(
            "the RoPE parameters of config.json cannot be used",
            str(error),
            "correct config.json",
        ) from error
    left = head_dim // 2 - len(rotated)
    if left < 0:
        raise KvlatheError(
            f"RoPE turns {2 * len(rotated)} dims of {head_dim}",
            "a head has no more",
            "correct config.json",
        )
    return Rope(
        inv_freq=(*rotated.tolist(), *[0.0] * left),
        amplitude=(*[float(scale)] * len(rotated), *[1.0] * left),
        rotary_dim=2 * len(rotated),
        short_length=short_length,
    )


def _short_length(
    config: PreTrainedConfig,
    parameters: dict[str, Any],
    head_dim: int,
    max_seq_len: int,
) -> int | None:
    """The length up to which LongRoPE has other factors than at ``max_seq_len``."""
    if parameters["rope_type"] != "longrope":
        return None
    original = parameters.get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None)
    if not original or max_seq_len <= original:
        return None
    short, _ = _inverse_frequencies(config, parameters, head_dim, original)
    long, _ = _inverse_frequencies(config, parameters, head_dim, max_seq_len)
    return None if bool((short == long).all()) else int(original)


def _inverse_frequencies(
    config: PreTrainedConfig,
    parameters: dict[str, Any],
    head_dim: int,
    max_seq_len: int,
) -> tuple[torch.Tensor, float]:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if parameters["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=max_seq_len)
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / (
        parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    ), 1.0
