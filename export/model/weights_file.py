"""The file of a folded decoder's weights, whatever runs them: each tensor at its place,
written as it is made. A graph says where places are (export/onnx/model.py), or
decoder.json does (write_decoder)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvlathe.base.console import log, working
from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.blocks import routing_of
from kvlathe.export.model.decoder import Decoder
from kvlathe.export.model.device import CPU, ahead
from kvlathe.export.model.layer import Widths, head_places
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.layers.latent import LatentForm
from kvlathe.layers.wiring import LayerWiring, Wiring
from kvlathe.plan.heads import RANK_MULTIPLE
from kvlathe.plan.manifest import DECODER_FILE, WEIGHTS_FILE
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.weight_formats import PLAIN, WeightFormats

ALIGN = 4096
"""Bytes: weights begin on memory pages, so that runtimes map the file instead of
reading it."""
DTYPES = {"float32": torch.float32, "float16": torch.float16}
FLOATS = DTYPES.values()
AT_ONCE = 1 << 26
"""Bytes that come from a GPU at a time."""


@dataclass(frozen=True)
class Place:
    """Place of a weight in the data file, in bytes, with its shape and type."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def next(self) -> int:
        """The first offset at which another weight may begin."""
        return -(-self.end // ALIGN) * ALIGN


def write_weights(
    path: Path,
    places: Mapping[str, Place],
    weights: Mapping[str, Tensor],
    device: torch.device = CPU,
) -> None:
    """Write each tensor at its place, from the file's beginning to its end; on a GPU,
    ``device``, the next one is made while one is written. Raises KvlatheError for a
    foreign, missing or misshapen one."""
    _check_names(places, weights)

    def made(name: str) -> tuple[Place, Tensor]:
        place = places[name]
        return place, _stored(name, weights[name], place)

    in_file = sorted(places, key=lambda name: places[name].offset)
    total = sum(place.size for place in places.values())
    with path.open("wb") as file, working("writing weights", total, "bytes") as advance:
        file.truncate(max((place.end for place in places.values()), default=0))
        for place, tensor in ahead(made, in_file, device):
            file.seek(place.offset)
            for piece in _on_host(tensor):
                file.write(piece)
                advance(len(piece))


def _check_names(places: Mapping[str, Place], weights: Mapping[str, Tensor]) -> None:
    missing = sorted(places.keys() - weights.keys())
    if missing:
        raise KvlatheError(
            f"weights are missing ({', '.join(missing[:3])} ...)",
            "the decoder needs all of them",
        )
    foreign = sorted(weights.keys() - places.keys())
    if foreign:
        raise KvlatheError(
            f"the weight {foreign[0]} is none of the decoder's",
            "no such weight is wanted",
            "fold for this plan",
        )


def _stored(name: str, tensor: Tensor, place: Place) -> Tensor:
    if tuple(tensor.shape) != place.shape:
        raise KvlatheError(
            f"weight {name} has shape {list(tensor.shape)}",
            f"the decoder wants shape {list(place.shape)}",
            "fold it for this plan",
        )
    stored = tensor.detach().to(place.dtype)
    if stored.dtype in FLOATS and not bool(stored.isfinite().all()):
        if not bool(tensor.isfinite().all()):
            raise KvlatheError(
                f"weight {name} holds NaN or infinite numbers",
                "the checkpoint's weights or settings give no others",
                "check that config.json belongs to the weights",
            )
        raise KvlatheError(
            f"weight {name} does not fit {place.dtype}",
            "it holds larger numbers",
            "build with --dtype float32",
        )
    return stored.contiguous()


def _on_host(tensor: Tensor) -> Iterator[memoryview]:
    """Bytes of a tensor, in pieces; a piece is gone when the next one is asked for."""
    flat = tensor.view(-1).view(torch.uint8)
    if not tensor.is_cuda:
        yield flat.numpy().data
        return
    # Pinned memory takes several times the bytes a second, and is taken only once.
    page = torch.empty(AT_ONCE, dtype=torch.uint8, pin_memory=True)
    for piece in flat.split(AT_ONCE):
        host = page[: len(piece)]
        host.copy_(piece)
        yield host.numpy().data


# -- without a graph -------------------------------------------------------------------
def write_decoder(
    spec: DecoderSpec,
    plan: CompressionPlan,
    weights: Mapping[str, Tensor],
    out_dir: Path,
    dtype: str = "float32",
    device: torch.device = CPU,
    formats: WeightFormats = PLAIN,
) -> None:
    """Write ``out_dir``/model.onnx.data, and decoder.json: where each weight lies and
    how layers are wired. Runtimes that build the decoder themselves need no more.
    ``weights`` are in ``formats``. Raises as ``write_weights``."""
    places = decoder_places(spec, plan, DTYPES[dtype], formats)
    log.info("folding and writing weights")
    write_weights(out_dir / WEIGHTS_FILE, places, weights, device)
    tensors = {name: _entry(place) for name, place in places.items()}
    index = {
        "weights": WEIGHTS_FILE,
        "wiring": asdict(wiring(spec, plan)),
        "tensors": tensors,
    }
    (out_dir / DECODER_FILE).write_text(
        json.dumps(index, indent=1, allow_nan=False), "utf-8"
    )


def decoder_places(
    spec: DecoderSpec,
    plan: CompressionPlan,
    dtype: torch.dtype,
    formats: WeightFormats = PLAIN,
) -> dict[str, Place]:
    """Places of all tensors of the decoder, in the order of its layers."""
    with torch.device("meta"):
        state = Decoder(spec, plan, dtype, None, formats).state_dict()
    places: dict[str, Place] = {}
    at = 0
    for name, tensor in state.items():
        place = Place(at, tuple(tensor.shape), tensor.dtype)
        places[name] = place
        at = place.next
    return places


def _entry(place: Place) -> dict[str, object]:
    """dtype as torch names it, shape, and offset in bytes."""
    return {
        "dtype": str(place.dtype).removeprefix("torch."),
        "shape": list(place.shape),
        "offset": place.offset,
    }


def wiring(spec: DecoderSpec, plan: CompressionPlan) -> Wiring:
    """A file for runtimes that build the decoder from its weights."""
    experts = spec.family.experts
    gated = range(spec.layers) if spec.has_out_gates else ()
    return Wiring(
        norm=spec.family.norm,
        norm_eps=spec.family.norm_eps,
        activation=spec.family.activation,
        parallel=spec.family.parallel,
        head_dim=spec.head_dim,
        scales=tuple(spec.scale(layer) for layer in range(spec.layers)),
        ropes=spec.rope_of if len(spec.ropes) > 1 else (),
        wide_qk_norm=spec.family.wide_qk_norm,
        norm_after_rope=spec.family.norm_after_rope,
        soft_gates=spec.family.soft_gates,
        logit_softcap=spec.family.logit_softcap,
        bounds=spec.family.bounds,
        expert_limits=spec.family.expert_limits,
        routing=experts and routing_of(experts),
        temperature=spec.family.temperature,
        outputs=tuple(head_places(plan, layer) for layer in gated),
        latent=_latent_of(spec),
        mixing=spec.family.mixer and spec.family.mixer.mixing,
        mixes=spec.family.mixes,
        streams=spec.family.streams,
        own=_own_of(spec, plan),
    )


def _own_of(spec: DecoderSpec, plan: CompressionPlan) -> tuple[LayerWiring, ...]:
    if spec.shape.alike and not spec.family.value_norm:
        return ()
    own: list[LayerWiring] = []
    for layer in range(spec.layers):
        widths = Widths.folded(spec, plan, layer)
        ranks = widths.ranks if spec.family.value_norm else ()
        dims = spec.heads(layer).head_dim
        own.append(LayerWiring(dims, widths.turned, ranks))
    return tuple(own)


def _latent_of(spec: DecoderSpec) -> LatentForm | None:
    own = spec.family.latent
    if own is None:
        return None
    width = -(-own.rank // RANK_MULTIPLE) * RANK_MULTIPLE
    return LatentForm(own.rank, width, own.norm_eps)
