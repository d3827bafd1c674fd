"""StoredCodes: which tensors of a checkpoint folder are codes, and how they become
numbers.

A map is codes where its parts lie in the folder. What config.json says of it must agree.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.bitsandbytes import FourBit, FourBitMap, read_four_bit
from kvlathe.export.model.packed import (
    HeaderOf,
    PackedMap,
    Packing,
    Read,
    has_mxfp4,
    not_read,
    read_packing,
    resolved,
)
from kvlathe.export.model.scaled import ScaledMap, Scheme
from kvlathe.export.model.scaled_config import PASSED, Scaling, read_scaling

if TYPE_CHECKING:
    from kvlathe.export.model.spec import Settings

log = logging.getLogger("kvlathe")
CodedMap = PackedMap | ScaledMap | FourBitMap
Form = Packing | Scaling | FourBit
WORDS = ".qweight"
PACKED = "_packed"


def read_codes(config: Settings) -> Form | None:
    """Read from config.json how the weights are codes; None where they are numbers.
    Raises KvlatheError for codes that are not read."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    said = (
        config.get("quantization_config")
        or config.get("compression_config")
        or inner.get("quantization_config")
    )
    if not said or has_mxfp4(config):
        return None
    if not isinstance(said, dict):
        raise not_read(f"as {said!r:.60} says", "that is no quantization_config")
    return read_scaling(said) or read_four_bit(said) or read_packing(said)


class StoredCodes:
    """The codes of a folder whose config.json says ``form``. ``header_of`` and ``read``
    give its tensors. ``packing``: integers that an engine of as many bits may keep as
    they are; None where there are none."""

    def __init__(self, form: Form | None, header_of: HeaderOf, read: Read) -> None:
        self._form, self._header, self._read = form, header_of, read
        self.packing = form if isinstance(form, Packing) else None
        if isinstance(form, Scaling):
            self.packing = form.packing

    def __bool__(self) -> bool:
        return self._form is not None

    def of(self, name: str) -> CodedMap | None:
        """The map whose weight the folder would call ``name``, where it is codes. Raises
        KvlatheError where config.json and the folder contradict one another."""
        form = self._form
        if form is None or name.endswith(".bias"):
            return None
        if isinstance(form, Scaling):
            return self._scaled(form, name)
        if isinstance(form, FourBit):
            found = self._header(f"{name}{form.state}")
            return found and FourBitMap(form, name, self._read, self._header)
        base = name.removesuffix(".weight")
        if self._header(f"{base}{WORDS}") is None:
            return None
        return PackedMap(form, base, self._read, self._header)

    def _scaled(self, form: Scaling, name: str) -> ScaledMap | None:
        module = name.removesuffix(".weight")
        found = next((x for x in form.schemes(module) if self._has(x, name)), None)
        if found is None:
            return None
        if module in form.ignored:
            raise KvlatheError(
                f"the checkpoint holds codes of {module}",
                "the quantization_config of config.json says that it is not quantized",
                "correct its list, or download the checkpoint again",
            )
        return ScaledMap(found, name, self._read, self._header)

    def _has(self, scheme: Scheme, name: str) -> bool:
        """Whether a map has parts of ``scheme``: packed codes, or a scale."""
        return (
            self._header(f"{name}{scheme.parts.codes or scheme.parts.scales}")
            is not None
        )

    def settle(self, maps: Iterable[CodedMap]) -> None:
        """Take the zeros of ``maps``, which are all, as they are stored, and tell what
        of config.json an engine does not do. Raises KvlatheError where the zeros
        contradict it."""
        if isinstance(self._form, Packing):
            packed = [one for one in maps if isinstance(one, PackedMap)]
            self._form = self.packing = resolved(self._form, packed)
        elif isinstance(self._form, Scaling):
            for note in self._form.notes:
                log.warning("%s", note)

    def passes(self, name: str) -> bool:
        """Whether a tensor belongs to codes and no weight needs it."""
        return isinstance(self._form, Scaling) and PASSED.search(name) is not None


def weight_name(part: str) -> str:
    """The name of the weight that a tensor is the codes of; its own, where it is none."""
    if part.endswith(WORDS):
        return f"{part.removesuffix(WORDS)}.weight"
    return part.removesuffix(PACKED)
