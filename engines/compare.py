"""Do two engines say the same? On the same tokens, for any two engines that run here;
and by runtime, for one graph.

``compare`` asks both engines for the logits after every token of the same prompts: it
needs nothing but two oracles, so an engine may be compared with another plan, number
format, backend, or with the original model. ``compare_runtimes`` feeds the same raw
tensors to both graphs, each in its own runtime, with polygraphy, where these are
installed and have the device they want: it separates a runtime's deviation from all
that our session does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.plan.engine_folder import open_engine
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import ENGINE_FILE, ONNX_FILE
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.sight import NO_END
from kvlathe.tasks import metrics
from kvlathe.tasks.tasks import LogitsOracle

RUNTIME_TOKENS = 32
"""Tokens of the raw step that compare_runtimes feeds: half of them packed as a second
sequence."""


PAGES = 4
"""Pages of a text that tells two engines apart, beside what their windows hold."""


def telling_tokens(plan: CompressionPlan) -> int:
    """Tokens of a text on which ``plan`` does all that it does: its pages are sealed,
    and tokens have left its windows and budgets."""
    most = [group.life.most for group in plan.index.groups.values()]
    reach = max((tokens for tokens in most if tokens < NO_END), default=0)
    stay = max(group.life.stay_hot for group in plan.index.groups.values())
    return max(reach, stay) + PAGES * plan.page_tokens


def compare(
    a: LogitsOracle, b: LogitsOracle, token_ids: Sequence[int]
) -> dict[str, object]:
    """Logits of both engines after every token of one prompt.

    ``agreement``: share of places with the same greedy token; ``first_divergence``: the
    first place where they differ, None if there is none; ``kl`` of b against a: nats,
    mean.
    """
    if not token_ids:
        raise KvlatheError(
            "there is nothing to compare", "the prompt has no tokens", "give a prompt"
        )
    rows = range(len(token_ids))
    ours, theirs = a.logits(token_ids, rows), b.logits(token_ids, rows)
    if ours.shape != theirs.shape:
        raise KvlatheError(
            "the engines cannot be compared",
            f"their logits are {ours.shape} and {theirs.shape}",
            "name two engines of one model",
        )
    same = metrics.agree(ours, theirs)
    return {
        "tokens": len(token_ids),
        "max_logit_difference": float(np.abs(ours - theirs).max()),
        "agreement": float(same.mean()),
        "kl": float(metrics.kl(ours, theirs).mean()),
        "first_divergence": None if same.all() else int(np.argmin(same)),
    }


def compare_runtimes(a: Path, b: Path) -> dict[str, object]:
    """Largest difference of the logits of one raw prefill step, each engine in its own
    runtime through polygraphy.

    Raises KvlatheError where polygraphy, a runtime or its device is missing.
    """
    ours, theirs = (_logits(folder) for folder in (a, b))
    same = metrics.agree(ours, theirs)
    return {
        "tokens": RUNTIME_TOKENS,
        "max_logit_difference": float(np.abs(ours - theirs).max()),
        "agreement": float(same.mean()),
    }


def _logits(folder: Path) -> npt.NDArray[np.float32]:
    engine = open_engine(folder)
    manifest = engine.manifest
    plan = engine.plan
    if plan.stages:
        fact = f"{folder} cannot be compared by runtime"
        raise KvlatheError(
            fact,
            "a raw step is one graph's, and it has several",
            "compare what they say, without it",
        )
    try:
        with _runner(folder, manifest.backend) as runner:
            feed = raw_step(plan)
            return np.array(
                runner.infer(
                    {name: feed[name] for name in runner.get_input_metadata()}
                )["logits"]
            )
    except ImportError as error:
        raise KvlatheError(
            "the runtimes cannot be compared",
            str(error),
            f"run {pip_install('tensorrt')}",
        ) from error
    except (
        Exception
    ) as error:  # polygraphy ends with its own kind of exception whatever went wrong
        reason = str(error).strip().splitlines()[-1]
        fact = f"{manifest.backend} cannot run {folder} here"
        raise KvlatheError(fact, reason, "compare on the machine it is for") from error


def _runner(folder: Path, backend: str) -> Any:  # noqa: ANN401  polygraphy's runners share no public type
    """The runner of a backend; entering it loads the engine."""
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = {"": G_LOGGER.CRITICAL}  # it talks on stdout
    if backend == "onnxruntime":
        from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx

        return OnnxrtRunner(
            SessionFromOnnx(str(folder / ONNX_FILE), providers=["CPUExecutionProvider"])
        )
    from kvlathe.engines.targets.tensorrt import polygraphy_speaks

    polygraphy_speaks(backend)
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    return TrtRunner(EngineFromBytes(BytesFromPath(str(folder / ENGINE_FILE))))


def raw_step(plan: CompressionPlan) -> dict[str, npt.NDArray[Any]]:
    """Inputs of docs/attend.md for a prefill of two sequences of random tokens with
    nothing cached."""
    half, buckets = RUNTIME_TOKENS // 2, range(len(plan.index.buckets))
    once = np.arange(half, dtype=np.int32)
    units = max(CacheLayout(plan).page_stride) // plan.index.unit
    tokens = np.random.default_rng(plan.seed).integers(
        0, plan.model.vocab_size, RUNTIME_TOKENS
    )
    return {
        "input_ids": tokens.astype(np.int32),
        "positions": np.tile(once, 2),
        "cu_seqlens_q": np.array([0, half, RUNTIME_TOKENS], np.int32),
        "query_offsets": once,
        "lengths": np.zeros((2, len(buckets)), np.int32),
        "logit_rows": np.arange(RUNTIME_TOKENS, dtype=np.int32),
        **{f"page_table_{b}": np.zeros((2, 1), np.int32) for b in buckets},
        "pool_f32": np.zeros((units // 4, plan.index.unit), np.float32),
        "pool_f16": np.zeros((units // 2, plan.index.unit), np.float16),
        "pool_u8": np.zeros((units, plan.index.unit), np.uint8),
    }
