"""The backends that can build an engine, as data: what each is called, computes in, and
which module builds it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.weight_formats import WeightFormat, WeightFormats


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of a step where a build's config says nothing: sequences of a step,
    tokens of a prompt that pass at once, and tokens of a step (None: one chunk beside
    a token of every sequence)."""

    batch: int
    chunk: int
    tokens: int | None = None


ON_A_CPU = StepSizes(8, 512)
ON_A_GPU = StepSizes(256, 2048, 8192)
"""A GPU that computes fewer prompt tokens at once waits for its memory: an H200 takes
19,000 a second of an 8B model in steps of 512, and 36,000 in steps of 8,192."""


TABLE = WeightFormat("int8", 128)
MAT_MUL_N_BITS: Mapping[str, WeightFormats] = {
    "int8": WeightFormats(WeightFormat("int8", 128), TABLE),
    "int4": WeightFormats(WeightFormat("int4", 64), TABLE),
}
"""The formats of ONNX Runtime. The head in 4 bits costs half as much perplexity as all
other maps together, and the embedding in 8 costs none (docs/weights.md)."""


OF_TORCH: Mapping[str, WeightFormats] = {
    "fp8": WeightFormats(WeightFormat("fp8", 0)),
    "int4": WeightFormats(WeightFormat("int4", 64)),
}
"""The formats of the cuda backend, whose embedding and head stay in 16 bits."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """``dtypes``: what it computes in, the default first. ``ranks_tokens``: whether it
    says what attends a token. ``windows``: whether a query may see a window of the
    tokens. ``ages``: whether older tokens may have fewer bits than newer ones.
    ``paired``: as in CacheSettings. ``graph``: whether it is built from the
    ONNX graph; otherwise from the weights and decoder.json. ``hosted``: whether a host
    runs the checkpoint as it is, and the engine is plan and bases. ``sizes``: of its
    steps, by default. ``weights``: what its weights may be beside its dtypes.
    ``adapters``: whether it takes LoRA adapters while it runs. ``hidden_states``: whether
    rows may read what a model's head reads, as layers do that guess tokens.
    ``no_ranking``, ``no_windows``: why not.
    """

    module: str
    dtypes: tuple[str, ...]
    ranks_tokens: bool = False
    windows: bool = False
    ages: bool = False
    paired: bool = False
    graph: bool = True
    hosted: bool = False
    adapters: bool = False
    hidden_states: bool = False
    no_ranking: str = "its kernels do not report what attends them"
    no_windows: str = "no GPU has tested them there"
    sizes: StepSizes = ON_A_CPU
    weights: Mapping[str, WeightFormats] = field(default_factory=dict)


BACKENDS: Mapping[str, BackendInfo] = {
    "onnxruntime": BackendInfo(
        "kvlathe.engines.targets.onnxruntime",
        ("float32", "float16"),
        ranks_tokens=True,
        windows=True,
        ages=True,
        adapters=True,
        hidden_states=True,
        weights=MAT_MUL_N_BITS,
    ),
    "tensorrt_rtx": BackendInfo(
        "kvlathe.engines.targets.tensorrt",
        ("float16",),
        paired=True,
    ),
    "tensorrt": BackendInfo(
        "kvlathe.engines.targets.tensorrt",
        ("float16",),
        paired=True,
    ),
    "cuda": BackendInfo(
        "kvlathe.engines.targets.cuda",
        ("float16",),
        ranks_tokens=True,
        windows=True,
        graph=False,
        adapters=True,
        hidden_states=True,
        weights=OF_TORCH,
        sizes=ON_A_GPU,
    ),
    "vllm": BackendInfo(
        "kvlathe.engines.targets.vllm",
        ("float32",),
        graph=False,
        hosted=True,
        windows=True,
        no_ranking="vLLM has one block table for all heads",
        sizes=StepSizes(256, 1),  # a chunk is then one page
    ),
}


NOT_BUILT: Mapping[str, tuple[str, str]] = {
    "tensorrt_llm": (
        "its executor gives attention the address of one cache that is alike in all "
        "heads, and never seals a page",
        "serve with --backend cuda and kvlathe serve, or give TensorRT-LLM a checkpoint "
        "of --backend hf, whose rotated values lose less in a quantized cache (docs/scale.md)",
    )
}
"""Requests that cannot be built: why, and what to do instead."""


@dataclass(frozen=True, slots=True)
class Built:
    """The result of a backend, made of what was exported. ``versions`` of its
    libraries; ``architectures`` as in Manifest."""

    versions: Mapping[str, str]
    architectures: tuple[str, ...]


class Backend(Protocol):
    """A backend's module. ``name`` is the key in BACKENDS (one module may serve
    several)."""

    def identify(self, name: str) -> Built:
        """Its library versions and targets, before anything is built. Raises
        KvlatheError where one is missing."""
        ...

    def check_plan(self, name: str, plan: CompressionPlan) -> None:
        """Raise KvlatheError for a plan that its engines cannot run, before anything is
        made of it."""
        ...

    def build(
        self, name: str, folder: Path, plan: CompressionPlan, limits: Limits
    ) -> None:
        """Turn what was exported to ``folder`` into what this backend runs, in place.
        Raises KvlatheError if it cannot."""
        ...


def check_token_ranking(name: str, ranked: bool) -> None:
    """Raise KvlatheError where a plan ranks tokens by what attends them and backend
    ``name`` cannot tell."""
    if ranked and not BACKENDS[name].ranks_tokens:
        able = " or ".join(
            other for other, info in BACKENDS.items() if info.ranks_tokens
        )
        raise KvlatheError(
            f"the backend {name} cannot run a compression that ranks tokens",
            BACKENDS[name].no_ranking,
            f"build for {able}, or choose a compression that treats all tokens alike",
        )


def check_windows(name: str, windowed: bool) -> None:
    """Raise KvlatheError where a plan shows queries a window of the tokens and backend
    ``name`` shows them all."""
    if windowed and not BACKENDS[name].windows:
        able = " or ".join(other for other, info in BACKENDS.items() if info.windows)
        raise KvlatheError(
            f"the backend {name} cannot run a compression with windows",
            BACKENDS[name].no_windows,
            f"build for {able}, or choose a compression without windows",
        )


def backend(name: str) -> Backend:
    """The module that builds for ``name``. Raises KvlatheError for a name that is
    unknown, or of NOT_BUILT."""
    if refusal := NOT_BUILT.get(name):
        raise KvlatheError(f"the backend {name} cannot be built", *refusal)
    info = BACKENDS.get(name)
    if info is None:
        raise KvlatheError(
            f"there is no backend {name!r}", "", f"choose one of {', '.join(BACKENDS)}"
        )
    return importlib.import_module(info.module)  # type: ignore[return-value]
