"""Settings of a tiny model of every family, and of every setting that changes what it
computes."""

from __future__ import annotations

from typing import Any

from tests.support.families.experts import EXPERTS
from tests.support.families.gemma import GEMMA
from tests.support.families.hybrids import HYBRIDS
from tests.support.families.latents import LATENTS
from tests.support.families.older import OLDER
from tests.support.families.parts import PARTS
from tests.support.families.plain import PLAIN

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **PLAIN,
    **EXPERTS,
    **LATENTS,
    **GEMMA,
    **HYBRIDS,
    **OLDER,
    **PARTS,
}
"""Name -> (transformers class prefix, config)."""
