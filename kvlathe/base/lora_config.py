"""adapter_config.json of a LoRA adapter, as PEFT writes it: the scale of each map, and
what is refused because it is more than a product of two matrices."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvlathe.base.adapters import CONFIG, PICKLES, WEIGHTS, Adapter
from kvlathe.base.errors import KvlatheError
from kvlathe.base.json_files import read_object
from kvlathe.base.limited import LimitError
from kvlathe.base.patterns import fullmatch

PLAIN = re.compile(r"[\w.]+")
"""Names that are hardly expressions: a point stands for itself or for any character."""
Numbers = Mapping[str, float]
"""Values by name of a map, or by an expression that such names match."""
LARGEST = 1e30
FOREIGN = {
    "use_dora": "it is DoRA, which scales each output after the sum",
    "lora_bias": "it trains biases of its own",
    "modules_to_save": "it holds whole modules beside LoRA",
    "target_parameters": "it changes parameters of experts, which have three dimensions",
    "trainable_token_indices": "it trains rows of the embedding",
    "layer_replication": "it repeats layers of the model",
    "alora_invocation_tokens": "it begins in the middle of a prompt",
    "use_qalora": "its inputs are pooled by groups",
    "use_bdlora": "its matrices are in blocks",
    "kasa_config": "it is KaSA, which changes the model's own weights too",
    "monteclora_config": "it is MonteCLoRA, which samples its matrices",
    "arrow_config": "it chooses among adapters for each token",
}
"""Settings that add something else than a product -> what that is."""
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the model's own weights as they are."""
REMEDY = "merge it with PEFT (merge_and_unload), save the model and build that"


@dataclass(frozen=True)
class LoraConfig:
    """``modules``: an expression of names, or names and ends of names. ``digest``:
    SHA-256 of the file."""

    path: Path
    r: float
    alpha: float
    ranks: Numbers
    alphas: Numbers
    square_root: bool
    modules: str | tuple[str, ...]
    base: str
    digest: str

    def names(self, module: str) -> bool:
        """Whether target_modules has a map of the model."""
        if isinstance(self.modules, str):
            return self.modules == "all-linear" or self._matches(self.modules, module)
        ends = (f".{end}" for end in self.modules)
        return module in self.modules or module.endswith(tuple(ends))

    def rank(self, module: str) -> float:
        """Rank of A and B of a map."""
        return self._of(self.ranks, module, self.r)

    def scale(self, module: str) -> float:
        """The factor of B @ A of a map: alpha / r (LoRA, arXiv 2106.09685), or
        alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)."""
        rank = self.rank(module)
        below = rank**0.5 if self.square_root else rank
        return self._of(self.alphas, module, self.alpha) / below

    def _of(self, by_name: Numbers, module: str, default: float) -> float:
        """Look up as PEFT does: the first name or expression that the module's name
        ends with."""
        for name, number in by_name.items():
            if PLAIN.fullmatch(name) and not module.endswith(name.split(".")[-1]):
                continue  # most names are of other maps
            if self._matches(rf"(?:.*\.)?(?:{name})", module):
                return number
        return default

    def _matches(self, expression: str, module: str) -> bool:
        try:
            return bool(fullmatch(expression, module))
        except LimitError as error:
            raise unreadable(
                self.path, f"{expression!r} cannot be matched: {error}"
            ) from error


def read_lora_config(adapter: Adapter) -> LoraConfig:
    """Raises KvlatheError for a folder that holds no adapter, and for one that adds
    more than products."""
    path = adapter.folder / CONFIG
    try:
        _check_files(adapter)
        data = path.read_bytes()
    except OSError as error:
        raise refusal(adapter, str(error), "give a folder that can be read") from error
    said = cast("dict[str, object]", read_object(path, data))
    _refuse_foreign(adapter, said)
    rank = _numbers(path, "r", {"": said.get("r", 8)})
    alpha = _numbers(path, "lora_alpha", {"": said.get("lora_alpha", 8)})
    ranks = _numbers(path, "rank_pattern", said.get("rank_pattern") or {})
    if min([*rank.values(), *ranks.values()]) <= 0:
        raise unreadable(path, "a rank is not above 0")
    return LoraConfig(
        path,
        rank[""],
        alpha[""],
        ranks,
        _numbers(path, "alpha_pattern", said.get("alpha_pattern") or {}),
        bool(said.get("use_rslora")),
        _modules(path, said.get("target_modules")),
        str(said.get("base_model_name_or_path") or ""),
        hashlib.sha256(data).hexdigest(),
    )


def unreadable(path: Path, reason: str) -> KvlatheError:
    return KvlatheError(f"{path} cannot be read", reason, "save the adapter again")


def refusal(adapter: Adapter, reason: str, remedy: str = REMEDY) -> KvlatheError:
    return KvlatheError(f"{adapter.folder} cannot be used", reason, remedy)


def _check_files(adapter: Adapter) -> None:
    folder = adapter.folder
    if not folder.is_dir():
        raise KvlatheError(
            f"there is no folder {folder}",
            "an adapter was to be in it",
            "give the folder of an adapter",
        )
    missing = [path.name for path in adapter.files if not path.is_file()]
    if not missing:
        return
    pickled = [path.name for path in folder.iterdir() if path.suffix in PICKLES]
    if pickled and missing == [WEIGHTS]:
        raise KvlatheError(
            f"the weights in {folder} are pickled ({min(pickled)})",
            "reading a pickle can run code hidden in it",
            "convert them where you trust them: save_pretrained of PEFT writes safetensors",
        )
    raise KvlatheError(
        f"{folder} is no LoRA adapter",
        f"it has no {missing[0]}",
        "give a folder that PEFT's save_pretrained wrote",
    )


def _refuse_foreign(adapter: Adapter, said: Mapping[str, object]) -> None:
    kind = said.get("peft_type")
    if kind != "LORA":
        raise refusal(adapter, f"its peft_type is {kind!r}, and LORA is read")
    for name, reason in FOREIGN.items():
        if said.get(name):
            raise refusal(adapter, f"{reason} ({name})")
    bias = said.get("bias", "none")
    if bias != "none":
        raise refusal(adapter, f"it trains biases (bias is {bias!r})")
    start = said.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        reason = f"init_lora_weights {start!r} changes the model's own weights too"
        raise refusal(adapter, reason)


def _numbers(path: Path, name: str, said: object) -> Numbers:
    """Finite numbers by name."""
    if not isinstance(said, dict):
        raise unreadable(path, f"{name} is no object")
    found: dict[str, float] = {}
    for key, value in cast("dict[str, object]", said).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise unreadable(path, f"{name} is no number")
        if not abs(value) < LARGEST:
            raise unreadable(path, f"{name} is out of range")
        found[key] = float(value)
    return found


def _modules(path: Path, said: object) -> str | tuple[str, ...]:
    if isinstance(said, str):
        return said
    if isinstance(said, list):
        return tuple(map(str, cast("list[object]", said)))
    raise unreadable(path, "target_modules is neither text nor a list")
