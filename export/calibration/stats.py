"""Stats: what calibration learned about a model. Planning reads it and needs neither
the model nor its text again.

Moments are sums over tokens, in float64, so they add up: two halves of a calibration
merge into the whole, and how far the halves differ says how stable the whole is. Sizes:
L layers, H KV heads, d head dim; a lane is one (layer, KV head).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration.effective_ranks import Entropies
from kvlathe.plan import json_fields
from kvlathe.plan.heads import HeadShape, ModelShape

SCHEMA_VERSION = 3
MAXIMA = ("k_max", "v_max")

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over ``tokens`` tokens. q and k are post-RoPE; q, o and ``spread`` are also
    summed over the lane's query heads. Of layers that read one cache, q is their sum
    and o and ``spread`` are their mean, where it is stored. A layer with fewer heads or
    dims than others has zeros there.

    ``qq``, ``kk``, ``vv``, ``oo`` [L, H, d, d]: outer products x^T x of queries, keys,
    values and of attention's outputs (probabilities times values, before W_O). ``q``,
    ``k``, ``v``, ``o`` [L, H, d]: plain sums.
    ``spread`` [L, H]: sum over queries of sum_j p_j |(v_j - o) W_O|^2, the output's squared change for a unit change of
    scores.
    ``hidden`` [L]: squared norm of the layer's input, each sequence's tokens counted as
    its median one: a first token may be thousands of times as large. ``k_max``, ``v_max`` [L, H, d]:
    largest magnitude of each channel.
    """

    tokens: int
    qq: Array
    kk: Array
    vv: Array
    oo: Array
    q: Array
    k: Array
    v: Array
    o: Array
    spread: Array
    hidden: Array
    k_max: Array
    v_max: Array

    @classmethod
    def zeros(cls, shape: ModelShape) -> Moments:
        lanes, d = (shape.layers, shape.kv_heads), shape.head_dim
        sizes = {"spread": lanes, "hidden": lanes[:1]}
        for name in "qkvo":
            sizes |= {2 * name: (*lanes, d, d), name: (*lanes, d)}
        return cls(
            0, **{name: np.zeros(sizes.get(name, (*lanes, d))) for name in ARRAYS}
        )

    def __add__(self, other: Moments) -> Moments:
        merged = {
            name: (np.maximum if name in MAXIMA else np.add)(
                getattr(self, name), getattr(other, name)
            )
            for name in ARRAYS
        }
        return Moments(self.tokens + other.tokens, **merged)

    def second(self, name: str, centred: bool) -> Array:
        """Mean of x^T x of ``k``, ``v`` or ``o``, around its mean if ``centred``. q and
        o count one token G times: see mean.
        """
        outer = getattr(self, 2 * name) / self.tokens
        if not centred:
            return outer
        return outer - _outer(self.mean(name))

    def mean(self, name: str) -> Array:
        """[L, H, d]"""
        return getattr(self, name) / self.tokens


ARRAYS = tuple(
    field.name for field in dataclasses.fields(Moments) if field.name != "tokens"
)


def _outer(x: Array) -> Array:
    return x[..., :, None] * x[..., None, :]


@dataclass(frozen=True, eq=False)
class Stats:
    """A calibration, in two halves (every other sequence).

    ``wv_gram`` [L, H, d, d] = W_V^T W_V of the lane; ``wo_gram`` = sum over its query
    heads of W_O W_O^T. ``scale`` [L] multiplies the scores. ``rope``: whether positions
    rotate q and k. ``entropies`` of each calibration sequence, in order. ``source``
    says where the tokens came from, for people.
    """

    shape: ModelShape
    rope: bool
    scale: Array
    wv_gram: Array
    wo_gram: Array
    halves: tuple[Moments, Moments]
    entropies: Entropies
    model_digest: str
    source: dict[str, Any]

    @cached_property
    def whole(self) -> Moments:
        return self.halves[0] + self.halves[1]

    @property
    def tokens(self) -> int:
        return self.whole.tokens

    def half(self, index: int) -> Stats:
        """The same model seen by one half of the calibration alone."""
        return dataclasses.replace(
            self, halves=(self.halves[index], Moments.zeros(self.shape))
        )

    def kinds(self) -> list[tuple[list[int], Stats]]:
        """Layers whose heads have one shape, and the statistics of them alone, as of a
        model that has no others."""
        if self.shape.alike:
            return [([*range(self.shape.layers)], self)]
        layers: dict[HeadShape, list[int]] = {}
        for layer in range(self.shape.layers):
            if self.shape.lanes(layer):
                layers.setdefault(self.shape.heads(layer), []).append(layer)
        return [(own, self._of(own, heads)) for heads, own in layers.items()]

    def _of(self, layers: list[int], heads: HeadShape) -> Stats:
        def part(x: Array) -> Array:
            inner = [heads.kv_heads, *[heads.head_dim] * (x.ndim - 2)][: x.ndim - 1]
            return x[(layers, *map(slice, inner))]

        def parts(half: Moments) -> Moments:
            return Moments(half.tokens, **{x: part(getattr(half, x)) for x in ARRAYS})

        return dataclasses.replace(
            self,
            shape=dataclasses.replace(
                self.shape,
                layers=len(layers),
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                own_heads=(),
                sources=(),
            ),
            scale=self.scale[layers],
            wv_gram=part(self.wv_gram),
            wo_gram=part(self.wo_gram),
            halves=(parts(self.halves[0]), parts(self.halves[1])),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over every number that planning may read."""
        total = hashlib.sha256(self._header().encode())
        for name, array in sorted(self._arrays().items()):
            total.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return total.hexdigest()

    def require_model(self, shape: ModelShape, model_digest: str) -> None:
        """Raise KvlatheError unless these are the statistics of that model."""
        if (self.shape, self.model_digest) != (shape, model_digest):
            raise KvlatheError(
                "the statistics are of another model",
                f"they say {self.model_digest[:12]} and the checkpoint is {model_digest[:12]}",
                "calibrate this checkpoint",
            )

    # -- file form ---------------------------------------------------------------------
    def _header(self) -> str:
        facts = {
            "schema_version": SCHEMA_VERSION,
            "shape": dataclasses.asdict(self.shape),
            "rope": self.rope,
            "tokens": [half.tokens for half in self.halves],
            "texts": self.entropies.texts,
            "model_digest": self.model_digest,
            "source": self.source,
        }
        return json.dumps(facts, sort_keys=True)

    def _arrays(self) -> dict[str, Array]:
        own = {name: getattr(self, name) for name in ("scale", "wv_gram", "wo_gram")}
        own |= {
            f"entropy.{name}": array for name, array in self.entropies.arrays().items()
        }
        return own | {
            f"half{i}.{name}": getattr(half, name)
            for i, half in enumerate(self.halves)
            for name in ARRAYS
        }

    def save(self, path: Path | str) -> None:
        """Write an .npz: the arrays, and a header in JSON."""
        header = np.array(self._header())
        arrays = self._arrays()
        with Path(path).open("wb") as file:
            np.savez(file, header=header, **arrays)  # type: ignore[arg-type]

    def unread_positions(self, served: int) -> str:
        """Words for positions that are served and were not read: keys are cached after
        RoPE, which turns them further there. Empty for none, and for random tokens,
        which begin at 0 anyway."""
        read = self.source.get("max_seq_len")
        if self.source.get("source") == "random" or not isinstance(read, int):
            return ""
        if read >= served:
            return ""
        return (
            f"the statistics are of the first {read:,} positions, and {served:,} are "
            f"served: calibrate with --max-seq-len {served} for those"
        )

    @classmethod
    def load(cls, path: Path | str) -> Stats:
        """Raises KvlatheError for a missing, damaged or foreign file, another schema
        version, NaN and infinities."""
        try:
            if not zipfile.is_zipfile(path) and Path(path).is_file():
                raise ValueError("kvlathe calibrate has not written it, or not whole")
            with np.load(path, allow_pickle=False) as file:
                header = json.loads(str(file["header"]))
                version = header["schema_version"]
                arrays = {name: file[name] for name in file.files if name != "header"}
            if version != SCHEMA_VERSION:
                raise ValueError(
                    f"it has schema version {version}, this kvlathe reads {SCHEMA_VERSION}"
                )
            stats = _assembled(header, arrays)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            EOFError,
            zipfile.BadZipFile,
        ) as error:
            raise KvlatheError(
                f"the statistics {path} cannot be read", str(error), "calibrate again"
            ) from error
        check_finite(arrays)
        return stats


def _assembled(header: dict[str, Any], arrays: dict[str, Array]) -> Stats:
    shape = json_fields.read(ModelShape, header["shape"], "shape")
    empty = Moments.zeros(shape)
    halves = []
    for i, tokens in enumerate(header["tokens"]):
        own = {name: arrays[f"half{i}.{name}"] for name in ARRAYS}
        _check_shapes(own, {name: getattr(empty, name).shape for name in ARRAYS})
        halves.append(Moments(tokens, **own))
    wanted = Entropies.shapes(shape, header["texts"])
    entropies = {name: arrays[f"entropy.{name}"] for name in wanted}
    _check_shapes(entropies, wanted)
    return Stats(
        shape,
        header["rope"],
        arrays["scale"],
        arrays["wv_gram"],
        arrays["wo_gram"],
        (halves[0], halves[1]),
        Entropies(**entropies),
        header["model_digest"],
        header["source"],
    )


def _check_shapes(arrays: dict[str, Array], wanted: dict[str, tuple[int, ...]]) -> None:
    for name, array in arrays.items():
        if array.shape != wanted[name]:
            raise ValueError(f"{name} has the shape {array.shape}")


def check_finite(arrays: dict[str, Array]) -> None:
    """Raise KvlatheError naming the first array that holds NaN or infinity."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise KvlatheError(
                f"the statistics {name} hold NaN or infinity",
                "no basis can be computed from them",
                "check the checkpoint's weights and the calibration text",
            )
