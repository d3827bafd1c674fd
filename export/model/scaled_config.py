"""config.json of checkpoints whose codes have scales beside them: which maps are stored
in which scheme.

Read are ``fp8`` (Hugging Face, DeepSeek, AutoFP8), ``fbgemm_fp8``, ``compressed-tensors``
(llm-compressor; github.com/vllm-project/compressed-tensors) and ``modelopt``
(github.com/NVIDIA/Model-Optimizer), whose older exports say it in hf_quant_config.json
alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.packed import LEAST_GROUP, Packing, not_read
from kvlathe.export.model.scaled import (
    E2M1,
    E4M3,
    EXPONENTS,
    FLOATS,
    INT8,
    WORDS,
    Numbers,
    Parts,
    Scheme,
)

if TYPE_CHECKING:
    from kvlathe.export.model.spec import Settings

BESIDE = "hf_quant_config.json"
EVERY = "Linear"
"""The class of all maps, as a target."""
WHOLE, CHANNEL, BLOCK = (0, 0), (1, 0), (128, 128)
PLAIN, PACKED = Parts(), Parts(codes="_packed")
NVFP4 = Scheme(E2M1, (1, 16), Parts(whole="_scale_2"), ("F8_E4M3",))
MXFP4 = Scheme(E2M1, (1, 32), PLAIN, EXPONENTS)
MODELOPT = {
    "FP8": Scheme(E4M3, WHOLE, PLAIN),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(E4M3, CHANNEL, PLAIN),
    "FP8_PB_WO": Scheme(E4M3, BLOCK, PLAIN),
    "FP8_PB_REAL": Scheme(E4M3, BLOCK, PLAIN),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4,
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
    "MXFP8": Scheme(E4M3, (1, 32), PLAIN, EXPONENTS),
    "W8A16": Scheme(INT8, CHANNEL, PLAIN),
}
"""ModelOpt's ``quant_algo`` -> the scheme."""
FIXED = {
    "nvfp4-pack-quantized": Scheme(
        E2M1,
        (1, 16),
        Parts(codes="_packed", whole="_global_scale", divides=True),
        ("F8_E4M3",),
    ),
    "mxfp4-pack-quantized": Scheme(E2M1, (1, 32), PACKED, EXPONENTS),
    "mxfp8-quantized": Scheme(E4M3, (1, 32), PLAIN, EXPONENTS),
}
"""Formats of compressed-tensors that have one scheme each."""
PASSED = re.compile(
    r"(\.|_)(input_scale|activation_scale|input_global_scale|output_scale|"
    r"input_zero_point|output_zero_point|[qkv]_scale|[qkv]_zero_point|"
    r"prob_output_scale|activation_scale_ub|input_scale_ub)$"
)
"""Scales of activations and of cached tokens: weights need none of them."""


class Names:
    """Modules that patterns name: a regular expression after ``re:``, wildcards, a whole
    name, its beginning or its end; ``Linear``, the class of all maps."""

    def __init__(self, patterns: Iterable[str]) -> None:
        whole = set(patterns)
        self.every = EVERY in whole
        regexes = {x for x in whole if x.startswith("re:")}
        wild = {x for x in whole - regexes if set(x) & set("*?[")}
        self._whole = whole - regexes - wild
        self._regexes = [re.compile(x.removeprefix("re:")) for x in sorted(regexes)]
        self._regexes += [re.compile(translate(x)) for x in sorted(wild)]

    def __contains__(self, module: str) -> bool:
        words = module.split(".")
        ends = {".".join(words[at:]) for at in range(len(words))}
        ends |= {".".join(words[:at]) for at in range(1, len(words))}
        if self.every or not self._whole.isdisjoint(ends):
            return True
        return any(regex.match(module) for regex in self._regexes)


@dataclass(frozen=True)
class Rule:
    """The maps that ``targets`` name are stored in ``scheme``."""

    targets: Names
    scheme: Scheme


@dataclass(frozen=True)
class Scaling:
    """The form of a folder's maps: by the first rule that names them and whose parts
    are there, but those that ``ignored`` names are numbers. ``notes``: sentences on what
    the folder asks for and an engine does not do."""

    rules: tuple[Rule, ...]
    ignored: Names
    notes: tuple[str, ...] = ()

    def schemes(self, module: str) -> Iterator[Scheme]:
        """The schemes that the map ``module`` may have."""
        return (rule.scheme for rule in self.rules if module in rule.targets)

    @property
    def packing(self) -> Packing | None:
        """The form of all maps as an engine may keep it: integers with a scale for each
        group of each output. None where they are others, or several."""
        schemes = {rule.scheme for rule in self.rules}
        if len(schemes) != 1:
            return None
        scheme = schemes.pop()
        rows, group = scheme.block
        kept = group == 0 or (group >= LEAST_GROUP and not group & (group - 1))
        if not scheme.numbers.bits or rows != 1 or not kept:
            return None
        return Packing("scaled", scheme.numbers.bits, group, scheme.symmetric, False)


ALL = Names([EVERY])


def read_scaling(said: Settings) -> Scaling | None:
    """Read ``quantization_config``; None for a method of another module. Raises
    KvlatheError for what is not read."""
    readers: dict[object, Callable[[Settings], Scaling]] = {
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "modelopt_fp4": _modelopt,
    }
    method = said.get("quant_method")
    reader = readers.get(method) if isinstance(method, str) else None
    return reader(said) if reader is not None else None


def beside(folder: Path) -> Settings | None:
    """The quantization_config that ModelOpt put into a file of its own; None where there
    is none. Raises KvlatheError where it cannot be read."""
    path = folder / BESIDE
    if not path.is_file():
        return None
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        said = dict(whole["quantization"])
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise KvlatheError(
            f"{path} cannot be read", str(error), "download the checkpoint again"
        ) from error
    if not said.get("quant_algo"):
        return None
    return said | {"quant_method": "modelopt"}


E4M3_NAMES = ("e4m3", "float8_e4m3fn")
"""Names that checkpoints have for e4m3: DeepSeek's, and MiniMax's."""


# -- one reader a method ---------------------------------------------------------------
def _fp8(said: Settings) -> Scaling:
    """DeepSeek's blocks, or a scale for each map. AutoFP8 names no blocks, and ends
    scales as compressed-tensors does."""
    form = said.get("fmt") or "e4m3"
    if form not in E4M3_NAMES or said.get("expert_dtype") not in (None, "fp8"):
        raise not_read("in FP8 of another form", "weights of e4m3 alone are read")
    inverse, plain = BLOCK, WHOLE
    if "weight_block_size" in said:
        blocks = said["weight_block_size"]
        inverse = plain = WHOLE if blocks is None else _pair(blocks)
    rules = (
        Rule(ALL, Scheme(E4M3, inverse, Parts("_scale_inv"), FLOATS + EXPONENTS)),
        Rule(ALL, Scheme(E4M3, plain, Parts("_scale"), FLOATS + EXPONENTS)),
    )
    scheme = said.get("activation_scheme") or "dynamic"
    return Scaling(rules, _ignored(said), (_rounds_inputs(f"to FP8 ({scheme})"),))


def _fbgemm(said: Settings) -> Scaling:
    rules = (Rule(ALL, Scheme(E4M3, CHANNEL, PLAIN)),)
    return Scaling(rules, _ignored(said), (_rounds_inputs("to FP8 (dynamic)"),))


def _compressed(said: Settings) -> Scaling:
    sparse = _fields(said.get("sparsity_config") or {}, "sparsity_config")
    if sparse.get("format", "dense") != "dense":
        raise not_read("and sparse", f"{sparse['format']!r:.60} is not read")
    if _fields(said.get("transform_config") or {}, "transform_config").get(
        "config_groups"
    ):
        raise not_read("and rotated", "no record turns its activations")
    groups = _fields(said.get("config_groups") or {}, "config_groups")
    rules: list[Rule] = []
    rounded: set[str] = set()
    for name, group in groups.items():
        own = _fields(group, name)
        if own.get("input_activations"):
            rounded.add(_bits(_fields(own["input_activations"], "input_activations")))
        if own.get("weights"):
            rules.append(
                Rule(
                    Names(_texts(own.get("targets"), "targets")),
                    _compressed_scheme(
                        own.get("format") or said.get("format"),
                        _fields(own["weights"], "weights"),
                    ),
                )
            )
    notes = [_rounds_inputs(f"to {', '.join(sorted(rounded))}")] if rounded else []
    return Scaling(_ordered(rules), _ignored(said), (*notes, *_cache(said)))


def _compressed_scheme(form: object, weights: Settings) -> Scheme:
    bits, kind = weights.get("num_bits"), weights.get("type")
    what = f"as {form!r:.60} with {_bits(weights)}"
    if weights.get("dynamic"):
        raise not_read(what, "weights are not rounded as they are used")
    if isinstance(form, str) and form in FIXED:
        fixed = FIXED[form]
        if (bits, kind) != (8 if fixed.numbers == E4M3 else 4, "float"):
            raise not_read(what, "they contradict one another")
        if weights.get("group_size") not in (None, fixed.block[1]):
            raise not_read(what, f"its groups are of {fixed.block[1]}")
        return fixed
    numbers: Numbers | None = None
    if form == "pack-quantized" and kind == "int" and bits in (4, 8):
        numbers = WORDS[cast("int", bits)]
    elif form in ("float-quantized", "naive-quantized") and (kind, bits) == (
        "float",
        8,
    ):
        numbers = E4M3
    elif form in ("int-quantized", "naive-quantized") and (kind, bits) == ("int", 8):
        numbers = INT8
    if numbers is None:
        raise not_read(what, "no such codes are read")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise not_read(what, f"symmetric is {symmetric!r:.60}")
    parts = PACKED if form == "pack-quantized" else PLAIN
    return Scheme(numbers, _block(weights, what), parts, FLOATS, symmetric)


def _block(weights: Settings, what: str) -> tuple[int, int]:
    group, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy == "tensor":
        return WHOLE
    if strategy == "channel":
        return CHANNEL
    if strategy == "block":
        return _pair(weights.get("block_structure"))
    if isinstance(group, int) and strategy == "group" and 0 < group < 1 << 31:
        return 1, int(group)
    raise not_read(what, f"a scale for each {strategy!r:.60} of {group!r:.60}")


def _modelopt(said: Settings) -> Scaling:
    algorithm = said.get("quant_algo")
    rules: list[Rule] = []
    if algorithm == "MIXED_PRECISION":
        layers = _fields(said.get("quantized_layers") or {}, "quantized_layers")
        named: dict[Scheme, list[str]] = {}
        for name, layer in layers.items():
            own = _fields(layer, name)
            named.setdefault(_of_modelopt(own.get("quant_algo"), own), []).append(name)
        rules += [Rule(Names(names), scheme) for scheme, names in named.items()]
    else:
        rules.append(Rule(ALL, _of_modelopt(algorithm, said)))
    notes = []
    if "A16" not in str(algorithm) and algorithm != "FP8_PB_WO":
        notes.append(_rounds_inputs(f"as {algorithm} says"))
    return Scaling(tuple(rules), _ignored(said), (*notes, *_cache(said)))


def _of_modelopt(algorithm: object, said: Settings) -> Scheme:
    scheme = MODELOPT.get(algorithm) if isinstance(algorithm, str) else None
    if scheme is None:
        raise not_read(
            f"by ModelOpt as {algorithm!r:.60}", f"read are {', '.join(MODELOPT)}"
        )
    group = said.get("group_size")
    columns = scheme.block[1]
    if group not in (None, 0, columns) and columns not in (0, BLOCK[1]):
        raise not_read(f"in groups of {group!r:.60}", f"{algorithm} has {columns}")
    return scheme


# -- fields ----------------------------------------------------------------------------
def _fields(value: object, name: str) -> Settings:
    if not isinstance(value, dict):
        raise not_read(f"with {name} {value!r:.60}", "that is no object of fields")
    return cast("Settings", value)


def _texts(value: object, name: str) -> tuple[str, ...]:
    """A list of names and patterns."""
    if not isinstance(value, list):
        raise not_read(f"with {name} {value!r:.60}", "that is no list of names")
    patterns = cast("list[object]", value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise not_read(f"with {name} {pattern!r:.60}", "that is no name")
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise not_read(f"with {name} {pattern!r:.60}", str(error)) from error
    return tuple(cast("list[str]", patterns))


def _ignored(said: Settings) -> Names:
    """Modules that are no codes, in whichever field says it."""
    found: list[str] = []
    for field in (
        "ignore",
        "modules_to_not_convert",
        "ignored_layers",
        "exclude_modules",
    ):
        if said.get(field) is not None:
            found += _texts(said[field], field)
    return Names(found)


def _pair(value: object) -> tuple[int, int]:
    sizes = cast("list[object]", value) if isinstance(value, list) else []
    whole = [x for x in sizes if isinstance(x, int) and not isinstance(x, bool)]
    if len(sizes) != 2 or len(whole) != 2 or not all(0 < x < 1 << 31 for x in whole):
        raise not_read(f"in blocks of {value!r:.60}", "a block has two whole sizes")
    return whole[0], whole[1]


def _bits(args: Settings) -> str:
    return f"{args.get('num_bits')!r:.9} bit {args.get('type')!s:.20}"


def _ordered(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules that name modules before those for all."""
    return tuple(sorted(rules, key=lambda rule: rule.targets.every))


def _rounds_inputs(how: str) -> str:
    return (
        f"the checkpoint asks that the inputs of its maps are rounded {how}: its weights "
        "are read, and activations stay as --dtype says"
    )


def _cache(said: Settings) -> list[str]:
    asked = said.get("kv_cache_scheme") or said.get("kv_cache_quant_algo")
    if not asked:
        return []
    return [
        "the checkpoint asks for a cache in fewer bits: its scales are left out, as "
        "--compression says what an engine's cache is"
    ]
