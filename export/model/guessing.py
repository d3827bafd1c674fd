"""A checkpoint's layer that guesses tokens, as a model of its own: of one layer, whose
rows take a hidden state beside their token (export/families/guessing.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.guessing import (
    FIRST_LAYER,
    GUESSING,
    JOIN,
    NAMES,
    GuessingLayer,
)
from kvlathe.export.model.spec import DecoderSpec, Settings
from kvlathe.export.model.tensor_files import Header, TensorFile
from kvlathe.export.model.tensors import other_names

Files = Mapping[str, TensorFile]
"""Name of a tensor -> the file that has it."""


@dataclass(frozen=True)
class Renamed:
    """A TensorFile whose tensors have other names: ``stored`` has those of ``file``."""

    file: TensorFile
    stored: Mapping[str, str]

    def keys(self) -> Iterable[str]:
        return self.stored

    def get_tensor(self, name: str) -> Tensor:
        return self.file.get_tensor(self.stored[name])

    def get_slice(self, name: str) -> Header:
        return self.file.get_slice(self.stored[name])


def has_layer(spec: DecoderSpec, where: Files) -> bool:
    """Whether a checkpoint with these tensors has a layer that guesses."""
    own = GUESSING.get(spec.model_type)
    if own is None:
        return False
    join = next(name for name, role in own.names.items() if role == JOIN)
    return any(name.startswith(f"{_prefix(own, spec)}{join}.") for name in where)


def settings_of(raw: Settings) -> Settings:
    """config.json of the layer alone. Raises KvlatheError for a type of model of which
    nobody knows where it has one."""
    kind = str(raw.get("model_type"))
    if kind not in GUESSING:
        known = ", ".join(GUESSING)
        raise _lacks(f"it is known where models of {known} have theirs")
    own = dict(GUESSING[kind].settings) | {"num_hidden_layers": 1}
    text = raw.get("text_config")
    return raw | ({"text_config": text | own} if isinstance(text, dict) else own)


def alone(spec: DecoderSpec, layers: int, where: Files) -> tuple[DecoderSpec, Files]:
    """The spec and the tensors of the layer as a model of its own. ``spec``: of its
    settings; ``layers``: those of the model; ``where``: its tensors. Embedding and head
    are the model's, unless the layer has its own. Raises KvlatheError where there is no
    such layer."""
    form = GUESSING[spec.model_type]
    names = spec.family.names
    prefix = form.prefix.replace("{n}", str(layers))
    found: dict[str, str] = {}
    for role in ("embed", "head"):
        stored = f"{names[role]}.weight"
        every = (x for x in (stored, *other_names(spec, stored)) if x in where)
        for name in every:
            found[stored] = name
    for name in where:
        if name.startswith(prefix):
            found[_renamed(form, name.removeprefix(prefix))] = name
    if f"{JOIN}.weight" not in found:
        raise _lacks(f"there are no tensors {prefix}*")
    files = {name: Renamed(where[old], {name: old}) for name, old in found.items()}
    family = replace(spec.family, names={**names, **NAMES}, beside=())
    own = replace(spec, family=family, reads_hidden=True, gives_hidden=True)
    return own, files


def _prefix(own: GuessingLayer, spec: DecoderSpec) -> str:
    return own.prefix.replace("{n}", str(spec.layers))


def _renamed(own: GuessingLayer, name: str) -> str:
    """The name, in a model of the layer alone, of its tensor ``name``."""
    for part, new in own.names.items():
        if name.startswith(f"{part}."):
            return new + name.removeprefix(part)
    return f"{FIRST_LAYER}.{name.removeprefix(own.inside)}"


def _lacks(reason: str) -> KvlatheError:
    return KvlatheError(
        "the checkpoint has no layer that guesses tokens (--mtp)",
        reason,
        "give a checkpoint that has one, or a smaller model as the draft engine",
    )
