"""Basis: the matrices that a method found for each lane, and their file. Fold reads it;
nothing does at run time."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError

Array = npt.NDArray[np.floating]


@dataclass(frozen=True)
class LaneBasis:
    """One lane's matrices; a None changes nothing. d is head_dim, or the dims of the
    lane's chosen planes.

    q' = q a and k' = (k - centre_k) b, with a, b [d, up to rank_k]; exact at full rank
    when a b^T = 1. After RoPE, or folded into W_Q and W_K where the model has none. v'
    = (v - centre_v) a_v and v ~ v' o_v + centre_v, with a_v [head_dim, up to rank_v]
    and o_v [same, head_dim]. Fold pads with zeros up to the plan's ranks.
    """

    a: Array | None = None
    b: Array | None = None
    centre_k: Array | None = None
    a_v: Array | None = None
    o_v: Array | None = None
    centre_v: Array | None = None


class Basis(dict[tuple[int, int], LaneBasis]):
    """(layer, head) -> LaneBasis. Lanes without an entry (removed ones, full-rank
    plans) are left as they are."""

    def save(self, path: Path | str) -> None:
        """Write an .npz with arrays named ``layer.head.field``."""
        arrays = {
            f"{layer}.{head}.{field.name}": value
            for (layer, head), lane in self.items()
            for field in fields(LaneBasis)
            if (value := getattr(lane, field.name)) is not None
        }
        with Path(path).open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path | str) -> Basis:
        """Raises KvlatheError for a missing, damaged or foreign file."""
        matrices_of: dict[tuple[int, int], dict[str, Array]] = {}
        try:
            with np.load(path, allow_pickle=False) as arrays:
                for name in arrays.files:
                    layer, head, field = name.split(".")
                    of_lane = matrices_of.setdefault((int(layer), int(head)), {})
                    of_lane[field] = arrays[name]
            return cls({at: LaneBasis(**own) for at, own in matrices_of.items()})
        except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise KvlatheError(
                f"the basis {path} cannot be read", str(error), "plan again"
            ) from error
