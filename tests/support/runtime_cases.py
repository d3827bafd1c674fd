"""Parts that the runtime's tests share: small plans of every kind of bucket, and
sessions to run them on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from, fold
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.decoder import Decoder
from kvlathe.plan import manifest as manifests
from kvlathe.plan.formats import WHOLE_RANK, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL, Age, Budget, Compact, Divide, SealAfter, Window
from kvlathe.plan.manifest import KvBytes, Limits, Manifest
from kvlathe.plan.memory import memory_table
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import KeyFormula, ObservationWindow, TokenScore
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.prompt import Whole
from kvlathe.runtime.scheduling.sequence import PrefillChunk, Sequence
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.sessions.host.pages import HostPages
from kvlathe.runtime.sessions.protocols import Session, StepPlan
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.made_once import made_once

MODEL = Path(__file__).resolve().parents[2] / "models" / "lathe-5m"
HOT, U8 = Tier(32, 32), Tier(8, 8, "rank", "token", 64, 64)
U3 = Tier(3, 3, "rank", "token", 64, 64)
N4 = Tier(4, 4, "rank", "rank", 64, 64, coding_k="normal", coding_v="normal")
F8 = Tier(
    8,
    8,
    "rank",
    "rank",
    WHOLE_RANK,
    WHOLE_RANK,
    coding_k="float8",
    coding_v="float8",
)
FOUR = Tier(4, 4, "rank", "rank", 64, 64, rounding="stochastic")
NORMALIZED = ObservationWindow(recent=0.05, random=0.05, normalized=True)
HEAVY = ObservationWindow(recent=1.0, pooling=5, noise=0.5)
MIXED = (
    Tier(4, 4, "token", "rank", 64, 64, span_k=0.95),
    Tier(2, 2, "token", "rank", 64, 64, span_k=0.65),
)
RANKED = ("divided", "budget", "sealed budget", "unlike keys")
UNLIKE = KeyFormula("-dot(unit(keys), unit(mean(unit(keys))))")
CODED = Tier(4, 4, "rank", "token", 64, 32, "int", "stochastic")
CODED_8 = Tier(8, 8, "rank", "token", 64, 32, "int")
torch.set_num_threads(1)  # small matrices; the tests run side by side
BACKENDS = ("torch", "onnx")
LIMITS = Limits(
    max_batch_size=8, max_num_tokens=1024, max_input_len=3072, max_seq_len=4096
)


def plan_for(
    shape: ModelShape,
    groups: tuple[Group, ...],
    page: int = 64,
    chunk: int = 512,
    score: TokenScore | None = None,
) -> CompressionPlan:
    """Every lane at full rank, nothing projected."""
    d = shape.head_dim
    lanes = tuple(
        Lane(i, h, d, d, d) for i in range(shape.layers) for h in range(shape.kv_heads)
    )
    return CompressionPlan(
        shape,
        lanes,
        groups,
        page_tokens=page,
        prefill_chunk=chunk,
        score=score,
    )


def plans(
    shape: ModelShape, page: int = 64, chunk: int = 512
) -> dict[str, CompressionPlan]:
    """The same model in one group, in two (even and odd lanes), and with full pages
    sealed into 8 bit, or into 4 bit with attention on the codes."""
    every = tuple(range(shape.layers * shape.kv_heads))
    plan_of = partial(plan_for, shape, page=page, chunk=chunk)
    return {
        "one": plan_of((Group(every, HOT),)),
        "split": plan_of((Group(every[::2], HOT), Group(every[1::2], HOT))),
        "sealed": plan_of((Group(every, HOT, (U8,), SEAL),)),
        "coded": plan_of((Group(every, HOT, (CODED,), SEAL),)),
        "threes": plan_of((Group(every, HOT, (U3,), SEAL),)),
        "fixed": plan_of((Group(every, HOT, (N4,), SEAL),)),
        "floats": plan_of((Group(every, HOT, (F8,), SEAL),)),
        "sealed after": plan_of((Group(every, HOT, (U8,), SealAfter(page)),)),
        "aged": plan_of((Group(every, HOT, (U8, N4), Age(page, 2 * page)),)),
        "aged windows": plan_of(
            (
                Group(every[::2], HOT, (U8, N4), Age(0, page, page, 3 * page)),
                Group(every[1::2], HOT, (U8, U3), Age(0, 2 * page, page)),
            )
        ),
        "aged codes behind a window": plan_of(
            (Group(every, HOT, (CODED_8, CODED), Age(0, page, page, 3 * page)),)
        ),
        "aged alike": plan_of((Group(every, HOT, (U8, U8), Age(page, 2 * page)),)),
        "aged codes": plan_of((Group(every, HOT, (CODED_8, CODED), Age(0, 2 * page)),)),
        "sealed split": plan_of(
            (
                Group(every[:1], HOT, (U8,), SEAL),
                Group(every[1:], HOT, (Tier(16, 16),), SEAL),
            )
        ),
        **compacting_plans(shape, page, chunk),
        **windowed_plans(shape, page, chunk),
        **ranked_plans(shape, page, chunk),
    }


def compacting_plans(
    shape: ModelShape, page: int = 64, chunk: int = 512
) -> dict[str, CompressionPlan]:
    """Plans whose prefixes can be compacted: each lane apart, hot or sealed, or all
    alike."""
    every = tuple(range(shape.layers * shape.kv_heads))
    half = Compact(0.5)
    apart = tuple(Group((lane,), HOT, life=half) for lane in every)
    eight = Tier(8, 8, "rank", "token", 32, min(page, 64))
    sealed = tuple(Group((lane,), HOT, (eight,), half) for lane in every)
    plan_of = partial(plan_for, shape, page=page, chunk=chunk)
    return {
        "compacted": plan_of(apart),
        "compacted alike": plan_of((Group(every, HOT, life=half),)),
        "sealed compacted": plan_of(sealed),
    }


def windowed_plans(
    shape: ModelShape, page: int = 64, chunk: int = 512
) -> dict[str, CompressionPlan]:
    """Plans whose lanes see windows, hot or sealed: to the page beside one that sees
    all, or to the token."""
    every = tuple(range(shape.layers * shape.kv_heads))
    window, exact = Window(page, page), Window.of_tokens(3 * page // 2, page)
    hot = (
        Group(every[-1:], HOT),
        Group(every[:-1:2], HOT, life=window),
        Group(every[1:-1:2], HOT, life=exact),
    )
    cold = (Tier(8, 8, "rank", "token", 32, min(page, 64)),)
    sealed = (Group(every[:-1], HOT, cold, window), Group(every[-1:], HOT, cold, SEAL))
    plan_of = partial(plan_for, shape, page=page, chunk=chunk)
    return {
        "windowed": plan_of(tuple(group for group in hot if group.lanes)),
        "sealed windows": plan_of(sealed),
    }


def ranked_plans(
    shape: ModelShape, page: int = 64, chunk: int = 512
) -> dict[str, CompressionPlan]:
    """Plans whose tokens are ranked: divided between two number formats, or cut to
    budgets, hot or sealed."""
    every = tuple(range(shape.layers * shape.kv_heads))
    budgets = [Budget(n * page, recent=r) for n, r in ((2, 0), (3, 16))]
    eight, divide = Tier(8, 8, "rank", "rank"), Divide((0.6, 0.4))
    sealed = (
        Group(every[1:], HOT, (FOUR,), budgets[0]),
        Group(every[:1], HOT, (eight,), budgets[1]),
    )
    hot = (
        Group(every[::2], HOT, life=budgets[0]),
        Group(every[1::2], HOT, life=budgets[1]),
    )
    hot_one = Group(every[:1], HOT, life=budgets[1])
    last = ObservationWindow(last=8, accumulated=False)
    plan_of = partial(plan_for, shape, page=page, chunk=chunk)
    return {
        "mixed": plan_of((Group(every, HOT, MIXED, divide),), score=NORMALIZED),
        "divided": plan_of((Group(every, HOT, (U8, FOUR), divide),), score=NORMALIZED),
        "budget": plan_of(hot, score=last),
        "sealed budget": plan_of(sealed, score=HEAVY),
        "unlike keys": plan_of((sealed[0], hot_one), score=UNLIKE),
    }


class TorchSession(HostPages, Session):
    """The decoder in torch over the same pages: what an exported engine is compared
    with."""

    def __init__(self, decoder: Decoder, arena_bytes: int) -> None:
        super().__init__(CacheLayout(decoder.plan), arena_bytes)
        self.decoder = decoder
        self.pools = {name: torch.from_numpy(view) for name, view in self.views.items()}

    @torch.inference_mode()
    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        tensor = torch.from_numpy
        weights = step.observation_weights
        probed = [] if weights is None else [tensor(weights)]
        logits, rows, *mass = self.decoder(
            tensor(step.input_ids),
            tensor(step.positions),
            tensor(step.cu_seqlens_q),
            tensor(step.query_offsets),
            tensor(step.lengths),
            [tensor(table) for table in step.page_tables],
            self.pools,
            tensor(step.logit_rows),
            *probed,
        )
        self.append(step, rows.numpy())
        self.page_scores.observe((step, found.numpy(), 0) for found in mass)
        if step.observed_attention is not None:
            step.observed_attention[:] = mass[0].numpy()
        return logits.numpy()


def model_shape() -> ModelShape:
    return Checkpoint(MODEL).spec.shape


@cache
def decoder(kind: str) -> Decoder:
    """The shipped small model under ``plans()[kind]``."""
    return decoder_from(Checkpoint(MODEL), plans(model_shape())[kind], Basis())


@cache
def engine_folder(kind: str) -> Path:
    """The same, exported once a test run. Read only."""

    def exported(folder: Path) -> None:
        from kvlathe.export.onnx.model import export_onnx

        checkpoint, plan = Checkpoint(MODEL), plans(model_shape())[kind]
        export_onnx(checkpoint.spec, plan, fold(checkpoint, plan, Basis()), folder)

    return made_once(f"engine {kind}", exported)


def manifest_of(plan: CompressionPlan) -> Manifest:
    """The manifest of an engine of lathe-5m for ONNX Runtime."""
    return Manifest(
        model="lathe-5m",
        compression="none",
        backend="onnxruntime",
        versions={"onnxruntime": "1"},
        architectures=("cpu",),
        compute_dtype="float32",
        weights="float32",
        limits=LIMITS,
        page_tokens=plan.page_tokens,
        prefill_chunk=plan.prefill_chunk,
        kv_bytes=KvBytes(4096.0, 4096.0, 2048.0),
        plan_digest=plan.digest,
        model_digest="",
        command="",
        created="",
    )


def built_folder(folder: Path, kind: str = "split") -> Path:
    """An engine folder as a build leaves it, report aside."""
    plan = decoder(kind).plan
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL / name, folder)
    shutil.copytree(engine_folder(kind), folder, dirs_exist_ok=True)
    (folder / manifests.PLAN_FILE).write_text(plan.to_json())
    manifests.write(folder, manifest_of(plan))
    return folder


def session(
    backend: str, kind: str, arena_bytes: int, limits: Limits = LIMITS
) -> Session:
    if backend == "torch":
        return TorchSession(decoder(kind), arena_bytes)
    return OrtSession(
        engine_folder(kind), decoder(kind).plan, limits, arena_bytes, threads=2
    )


def llm(backend: str, kind: str, tokens: int = 8192, limits: Limits = LIMITS) -> LLM:
    """With room for about ``tokens`` cached tokens."""
    layout = CacheLayout(decoder(kind).plan)
    size = layout.bytes_for(tokens) + 8 * len(layout.page_stride) * max(
        layout.page_stride
    )
    if layout.plan.index.ranked:
        size += memory_table(layout, tokens, 1)[-1]["peak"]
    return LLM(
        session(backend, kind, size, limits),
        layout.plan,
        limits,
        Tokenizer(MODEL),
        size,
    )


@cache
def text(length: int, start: int = 0) -> tuple[int, ...]:
    """Real tokens, so that logits are spread as in use."""
    return tuple(_whole_text()[start : start + length])


@cache
def _whole_text() -> list[int]:
    lines = (
        (MODEL.parents[1] / "data" / "eval_text.jsonl").read_text("utf-8").splitlines()
    )
    return Tokenizer(MODEL).encode(
        " ".join(json.loads(line)["text"] for line in lines[:24])
    )


@cache
def at_once(length: int, start: int = 0) -> npt.NDArray[np.float32]:
    """Next-token logits of every token, one pass over the whole text with nothing
    cached."""
    return decoder("one").logits(text(length, start), range(length)).numpy()


def forced(
    llm: LLM, texts: Items[Items[int]], schedule: Iterable[Items[int]]
) -> list[npt.NDArray[np.float32]]:
    """Feed each text in chunks of the sizes that ``schedule`` gives, step by step, side
    by side in packed steps.

    Returns the next-token logits [tokens, vocab] of every text.
    """
    chunk, sampler = llm.plan.prefill_chunk, Sampler(SamplingParams())
    sequences = [
        Sequence(
            list(text),
            len(text),
            llm.pool.open(),
            Whole.cut(len(text), chunk),
            sampler,
        )
        for text in texts
    ]
    found: list[list[npt.NDArray[np.float32]]] = [[] for _ in texts]
    for sizes in schedule:
        chunks, owners = [], []
        for i, (sequence, size) in enumerate(zip(sequences, sizes, strict=True)):
            if count := min(size, len(sequence.tokens) - sequence.cached):
                seal = sequence.seals_after(count)
                chunks.append(
                    PrefillChunk(
                        sequence,
                        count,
                        llm.pool.reserve(sequence.table, count, seal),
                        range(count),
                    )
                )
                owners += [i] * count
        for i, row in zip(
            owners, llm.engine.run(chunks) if chunks else (), strict=True
        ):
            found[i].append(row)
    for sequence in sequences:
        llm.pool.release(sequence.table)
    return [np.stack(rows) for rows in found]
