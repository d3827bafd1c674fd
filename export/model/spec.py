"""DecoderSpec: all that the decoder must know of a model, read from its config.json. No
code of the folder is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families import (
    FAMILIES,
    RECORD,
    SUPPORTED,
    TEXT_PARTS,
    Family,
    as_known,
)
from kvlathe.export.families.unknown import why_unknown
from kvlathe.export.model.packed import has_mxfp4
from kvlathe.export.model.rope import Rope, read_ropes
from kvlathe.export.model.scaled_config import beside
from kvlathe.export.model.stored_codes import read_codes
from kvlathe.layers.rows import ACTIVATIONS
from kvlathe.plan.heads import HeadShape, ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    FamilyReader = Callable[[PreTrainedConfig], Family]
    """Each family's function takes its own config class, which _parse has made."""

Settings = dict[str, Any]
"""The fields of config.json."""
HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "OmniModel")
"""Ends of the names of models with a head that writes text."""
KINDS = {"full_attention", "sliding_attention"}
DENSE_KINDS = {"indexed_attention", "minimax_m3_sparse", "chunked_attention"}
"""Kinds of layers that are full attention up to ``dense_tokens``."""
MIXING_KINDS = {"linear_attention", "conv", "hybrid", "mlp", "moe"}
"""Kinds of layers that families with a mixer have beside them."""
QUERIES = frozenset(("q", "qkv", "q_out_gate"))
"""Roles of maps to queries."""
MOST = {
    "num_hidden_layers": 1 << 12,
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 14,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 28,
    "max_position_embeddings": 1 << 30,
}
"""Sizes -> far more than any model has."""
FOREIGN_SETTINGS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "attention_chunk_size",
    "no_rope_layers",
    "clip_qkv",
    "num_experts",
    "num_local_experts",
)
"""Settings that change results in other families and mean nothing in ours: a model with
one is not what it says."""


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes and wiring of one decoder.

    ``max_positions``: tokens the model was made for; ``max_seq_len``: tokens of the
    longest sequence to be served, at most that. ``ropes`` is empty for learned
    positions; ``rope_of``: which of them each layer has. The dims of q and k are in
    Rope's canonical order everywhere (``order``). Where layers differ in their heads,
    ``head_dim`` is the most that any has (``heads``). Where heads share a
    latent, ``head_dim`` is that of the one key that they read. ``reads_hidden``: it is a
    layer that guesses tokens, whose rows take a hidden state beside their token;
    ``gives_hidden``: the checkpoint has one, for which hidden states are given.
    """

    model_type: str
    family: Family
    layers: int
    query_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    max_seq_len: int
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    tied_head: bool
    reads_hidden: bool = False
    gives_hidden: bool = False

    @property
    def rope(self) -> Rope | None:
        """The first of them, where attention turns whole heads: of a key with a latent
        the layer turns the other dims before."""
        return self.ropes[0] if self.ropes and self.family.latent is None else None

    @property
    def planes(self) -> tuple[int, ...]:
        """Planes of each of ``ropes``."""
        return tuple(len(rope.inv_freq) for rope in self.ropes)

    @property
    def has_positions(self) -> bool:
        """Whether embeddings of positions are added to those of tokens."""
        return "positions" in self.family.names

    @property
    def has_out_gates(self) -> bool:
        """Whether gates multiply attention's output."""
        return bool({"out_gate", "q_out_gate"} & self.family.names.keys())

    @property
    def out_gates(self) -> int:
        """Gates of a layer: one for each query head, or for each of its dims."""
        dims = 1 if self.family.head_gates else self.head_dim
        return self.query_heads * dims

    @property
    def kv_heads(self) -> int:
        return self.family.kv_heads

    @property
    def group_size(self) -> int:
        """Query heads for each KV head, where layers are alike."""
        return self.query_heads // self.kv_heads

    def stored_heads(self, layer: int) -> int:
        """Query heads that the checkpoint has in a layer."""
        return (
            self.family.query_heads[layer]
            if self.family.query_heads
            else self.query_heads
        )

    def heads(self, layer: int) -> HeadShape:
        """The heads that a layer reads."""
        return self.shape.heads(layer)

    def group(self, layer: int) -> int:
        """Query heads for each KV head of a layer."""
        return self.shape.group(layer)

    def order(self, layer: int) -> list[int]:
        """Canonical dim c of a layer's queries and keys is the checkpoint's dim
        order[c]."""
        if self.rope is None:
            return list(range(self.heads(layer).head_dim))
        return self.ropes[self.rope_of[layer]].order

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape(
            layers=self.layers,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            softcap=self.family.attn_softcap,
            sinks="sinks" in self.family.names,
            latent=self.family.latent.rank if self.family.latent else 0,
            own_heads=self._own_heads,
            sources=self.family.sources,
            states=self._states,
            values=self.family.value_dims,
        )

    @property
    def _own_heads(self) -> tuple[HeadShape, ...]:
        """Heads of each layer where some have none, or as the family says."""
        layers = range(self.layers)
        if all(map(self.attends, layers)):
            return self.family.own_heads
        every = HeadShape(self.kv_heads, self.head_dim)
        return tuple(every if self.attends(i) else HeadShape(0, 0) for i in layers)

    @property
    def _states(self) -> tuple[int, ...]:
        found = [self.family.mixer_of(layer) for layer in range(self.layers)]
        if not any(found):
            return ()
        return tuple(mixer.mixing.numbers if mixer else 0 for mixer in found)

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return not QUERIES.isdisjoint(self.family.roles(layer))

    @property
    def rope_note(self) -> str:
        """A note on results that differ from transformers: fact, reason and remedy.
        Empty where they do not."""
        short = self.ropes[0].short_length if self.ropes else None
        if short is None:
            return ""
        return (
            f"sequences of up to {short} tokens differ from transformers: LongRoPE has "
            "short factors for them, and cached keys cannot turn again when a sequence "
            "grows beyond, so this engine uses the long factors for every sequence. "
            f"Build with --max-seq-len {short} for the short ones."
        )

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens that each layer's queries see, their own included; 0 where that is
        every token of the longest sequence."""
        given = self.family.windows or (0,) * self.layers
        return tuple(tokens if tokens < self.max_seq_len else 0 for tokens in given)

    def scale(self, layer: int) -> float:
        """The factor of a layer's scores q.k before the softmax."""
        scales = self.family.scales
        if scales is None:
            return (self.heads(layer).head_dim or self.head_dim) ** -0.5
        return scales[layer]


def read_spec(
    checkpoint_dir: Path | str, max_seq_len: int | None = None
) -> DecoderSpec:
    """The spec of a checkpoint folder, for sequences of up to ``max_seq_len`` tokens
    (default: as long as the model's). Raises as ``spec_of``."""
    return spec_of(read_config(Path(checkpoint_dir)), max_seq_len)


def spec_of(raw: Settings, max_seq_len: int | None = None) -> DecoderSpec:
    """The spec that the fields of a config.json say.

    Raises KvlatheError for a missing or unreadable config.json, an unsupported family,
    and every setting that would change the result and is not supported (ALiBi,
    quantized weights, ...).
    """
    config = _parse(raw)
    _check_magnitudes(config)
    try:
        return _spec(raw, config, max_seq_len)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as at:
        raise _invalid(at) from at  # a setting of another type, or out of all bounds


def _spec(
    raw: Settings, config: PreTrainedConfig, max_seq_len: int | None
) -> DecoderSpec:
    record = getattr(config, RECORD, config.model_type)
    family = cast("FamilyReader", FAMILIES[record])(config)
    part = TEXT_PARTS.get(raw["model_type"])
    if part is not None:
        beside = family.beside + part.beside
        family = replace(family, beside=beside, inside=part.inside)
    _refuse_settings(_text_settings(raw), family)
    served = _served(config.max_position_embeddings, max_seq_len)
    _check_dense(served, family)
    heads = max(family.query_heads, default=config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    head_dim = max([head_dim, *(own.head_dim for own in family.own_heads)])
    turning = head_dim
    if family.latent is not None:
        head_dim, turning = family.latent.key_dim, family.latent.turning
    _check_sizes(config, heads, family, turning)
    ropes, rope_of = (), ()
    # Of models whose layers all keep a state, or none, attention may know no positions.
    # Where a norm follows W_K, a basis cannot be folded: it is behind a RoPE that is still.
    nowhere = family.mixer and family.ropes and not any(map(_turns, family.ropes))
    nowhere = nowhere and "k_norm" not in family.names
    if "positions" not in family.names and not nowhere:
        own = [heads.head_dim for heads in family.own_heads]
        dims = own or [turning] * config.num_hidden_layers
        ropes, rope_of = read_ropes(config, dims, served, family)
    return DecoderSpec(
        model_type=raw["model_type"],
        family=family,
        layers=config.num_hidden_layers,
        query_heads=heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        max_seq_len=served,
        ropes=ropes,
        rope_of=rope_of,
        tied_head=bool(config.tie_word_embeddings),
    )


def _infinite(settings: Settings) -> Settings | float:
    """A number that JSON lacks, as transformers writes it: {"__float__": "Infinity"}."""
    named = settings.get("__float__")
    is_number = len(settings) == 1 and named in ("Infinity", "-Infinity", "NaN")
    return _constant(str(named)) if is_number else settings


def _constant(name: str) -> float:
    """Infinity may be a bound. Raises ValueError for NaN, which is no setting."""
    if name == "NaN":
        raise ValueError("a setting is NaN")
    return float(name)


def _turns(kind: str | None) -> bool:
    return kind is not None


def read_config(folder: Path) -> Settings:
    """Read config.json, and what lies beside it of its codes. Raises KvlatheError where
    it cannot be read."""
    if not folder.is_dir():
        raise KvlatheError(
            f"there is no checkpoint folder {folder}",
            "",
            "give the folder of a Hugging Face checkpoint",
        )
    path = folder / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text, object_hook=_infinite, parse_constant=_constant)
    except FileNotFoundError:
        raise KvlatheError(
            f"{folder} has no config.json",
            "it names the model's family and sizes",
            "give the folder of a Hugging Face checkpoint",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise KvlatheError(
            f"{path} cannot be read", str(error), "download the checkpoint again"
        ) from error
    if not isinstance(raw, dict):
        raise KvlatheError(
            f"{path} is not a JSON object", "", "download the checkpoint again"
        )
    raw = as_known(raw)
    said = None if raw.get("quantization_config") else beside(folder)
    return raw if said is None else raw | {"quantization_config": said}


def _text_settings(raw: Settings) -> Settings:
    """Those of the part for text, where it is one of several."""
    text = (raw.get("thinker_config") or raw).get("text_config")
    if raw["model_type"] not in TEXT_PARTS or not isinstance(text, dict):
        return raw
    return text | {"model_type": raw["model_type"]}


def _refuse_foreign(raw: Settings) -> None:
    if raw.get("model_type") not in SUPPORTED:
        raise _unsupported(raw)
    read_codes(raw)  # raises for codes that are not read
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise KvlatheError(
            f"config.json says architectures {names!r:.60}",
            "it is a list of names",
            "correct config.json",
        )
    if names and not any(str(name).endswith(HEADS) for name in names):
        raise KvlatheError(
            f"the checkpoint is a {names[0]}",
            "an engine needs a language model's head",
            "give a causal LM",
        )


def _unsupported(raw: Settings) -> KvlatheError:
    return KvlatheError(
        f"the model type {raw.get('model_type')!r} is not supported",
        why_unknown(raw),
        f"choose one of {', '.join(SUPPORTED)}",
    )


def _refuse_settings(raw: Settings, family: Family) -> None:
    for key in FOREIGN_SETTINGS:
        if key not in family.settings and raw.get(key) is not None:
            raise KvlatheError(
                f"config.json sets {key} to {raw[key]!r}",
                f"{raw['model_type']} models have no such thing and ignoring it could change the result",
                "remove the setting or give the right model_type",
            )


def _parse(raw: Settings) -> PreTrainedConfig:
    """transformers' own reading knows every default and older spelling; the class is
    chosen here, not by the folder. The part for text, where it is one of several."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _refuse_foreign(raw)
    kind = raw["model_type"]
    try:
        plain = {key: raw[key] for key in raw if key != "quantization_config"}
        if has_mxfp4(raw):
            plain = dict(raw)
        config = CONFIG_MAPPING[kind].from_dict(plain)
    except (
        Exception
    ) as error:  # its validators raise many kinds; each means that the file is at fault
        raise _invalid(error) from error
    if kind not in TEXT_PARTS:
        return _with_defaults(config)
    text = _with_defaults(config.get_text_config())
    if text.model_type not in FAMILIES:
        raise _unsupported(text.to_dict())
    if hasattr(config, "tie_word_embeddings"):  # else the text's own says it
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def _with_defaults(config: PreTrainedConfig) -> PreTrainedConfig:
    """``config``, whose fields that layers may override say what most have."""
    if config.is_heterogeneous:
        config.allow_global_per_layer_attribute_access = True
    return config


def _invalid(error: Exception) -> KvlatheError:
    said = " ".join(str(error).split()) or type(error).__name__
    remedy = "correct config.json"
    if isinstance(error, AttributeError):  # what an older transformers does not read
        remedy += ", or install a newer transformers"
    return KvlatheError("config.json is not valid", said, remedy)


def _check_magnitudes(config: PreTrainedConfig) -> None:
    """Raises KvlatheError for sizes that are none, or that no model has: tables of so
    many numbers would take all memory."""
    for name, most in MOST.items():
        size = getattr(config, name, None)
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= most:
            raise KvlatheError(
                f"config.json says {name} {size!r:.60}",
                f"it is a whole number from 1 to {most:,}",
                "correct config.json",
            )


def _served(max_positions: int, asked: int | None) -> int:
    served = max_positions if asked is None else asked
    if not 0 < served <= max_positions:
        raise KvlatheError(
            f"max_seq_len is {served}",
            f"the model was made for 1 to {max_positions} positions",
            "ask for a length in that range",
        )
    return served


def _check_dense(served: int, family: Family) -> None:
    """Raises KvlatheError for sequences in which queries would not see all tokens."""
    if family.dense_tokens and served > family.dense_tokens:
        raise KvlatheError(
            f"sequences of {served:,} tokens cannot be served",
            family.beyond,
            f"build with --max-seq-len {family.dense_tokens}: up to there every query "
            "sees all tokens",
        )


def _check_own_heads(heads: int, family: Family) -> None:
    """Heads that a family reads by itself: of layers that differ, and of a latent."""
    for own in family.own_heads:
        dims, kv_heads = own.head_dim, own.kv_heads
        if dims == kv_heads == 0:
            continue  # the layer has no attention
        if kv_heads < 1 or heads % kv_heads or dims < 2 or dims % 2:
            raise KvlatheError(
                f"a layer has {kv_heads} KV heads of {dims} dims",
                f"{heads} query heads divide over them, and their dims are even",
                "correct config.json",
            )
    widest = max((own.head_dim for own in family.own_heads), default=0)
    if family.latent is not None:
        widest = family.latent.key_dim
    if widest > MOST["head_dim"]:
        raise KvlatheError(
            f"a layer's keys have {widest:,} dims",
            f"no model has more than {MOST['head_dim']:,}",
            "correct config.json",
        )


def _check_sizes(
    config: PreTrainedConfig, heads: int, family: Family, head_dim: int
) -> None:
    types = set(getattr(config, "layer_types", None) or ())
    every = {heads, *family.query_heads}
    if family.kv_heads < 1 or any(one % family.kv_heads for one in every):
        raise KvlatheError(
            f"{heads} query heads do not divide over {family.kv_heads} KV heads",
            "",
            "correct config.json",
        )
    if head_dim < 2 or head_dim % 2:
        raise KvlatheError(
            f"head_dim is {head_dim}",
            "heads have an even number of dims",
            "correct config.json",
        )
    _check_own_heads(heads, family)
    if set(family.windows) == {1}:
        raise KvlatheError(
            "every layer has a window of 1 token",
            "queries see nothing but themselves, so that there is no cache",
            "correct config.json",
        )
    if family.activation not in ACTIVATIONS and "curve" not in family.names:
        raise KvlatheError(
            f"the activation {family.activation!r} is not supported",
            "",
            f"choose a model with one of {', '.join(ACTIVATIONS)}",
        )
    known = KINDS | (MIXING_KINDS if family.mixer else set())
    unknown = types - (known | DENSE_KINDS if family.dense_tokens else known)
    if unknown:
        raise KvlatheError(
            f"some layers are of the type {', '.join(sorted(unknown))}",
            "only full attention and sliding windows are supported",
            "choose another checkpoint, or install a newer transformers",
        )
