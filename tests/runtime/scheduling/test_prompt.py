"""Laws of stages: the graphs of a plan's layer groups are the one graph cut up; dropped
rows are not computed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.layer_runner import LayerRunner, embed
from kvlathe.plan.groups import Group
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import Budget
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.stages import Pass, Stage
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.native import library as native
from kvlathe.runtime.scheduling.prompt import Staged
from kvlathe.runtime.sessions.host.native import NativeSession
from kvlathe.runtime.sessions.host.onnx import Graph, OrtSession
from kvlathe.runtime.sessions.host.passes import HostRows, survivors
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.runtime_cases import (
    HOT,
    MODEL,
    at_once,
    plan_for,
    text,
)
from tests.support.staged_cases import LANES, SHAPE, engine, folder_of


def staged(*stages: Stage, split: bool = False) -> CompressionPlan:
    """Every lane whole; a group for each stage, or two of them (even and odd
    heads)."""
    ends = [*(s.first_layer for s in stages[1:]), SHAPE.layers]
    groups: list[Group] = []
    for stage, end in zip(stages, ends, strict=True):
        lanes = tuple(range(stage.first_layer * LANES, end * LANES))
        parts = (lanes[::2], lanes[1::2]) if split else (lanes,)
        groups += [Group(part, HOT) for part in parts]
    whole = plan_for(SHAPE, (Group(tuple(range(SHAPE.layers * LANES)), HOT),))
    return dataclasses.replace(
        whole,
        groups=tuple(groups),
        stages=stages,
        score=ObservationWindow(last=8),
    )


THREE = (Stage(0), Stage(1, 96), Stage(3, 64))


def test_stages_survive_the_plan_file_and_change_its_digest() -> None:
    plan = staged(*THREE)
    again = CompressionPlan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    assert staged(Stage(0), Stage(1, 96), Stage(3, 80)).digest != plan.digest
    assert json.loads(plan.to_json())["stages"][1] == {"first_layer": 1, "tokens": 96}


def test_stages_that_lose_no_token_of_a_prompt_are_one_pass() -> None:
    plan = staged(*THREE)
    assert plan.index.passes(60) == (Pass(0, 3, 60),)
    assert plan.index.passes(80) == (Pass(0, 2, 80), Pass(2, 3, 64))
    assert plan.index.passes(500) == (Pass(0, 1, 500), Pass(1, 2, 96), Pass(2, 3, 64))
    assert staged(Stage(0), Stage(2, 64), Stage(3, 64)).index.passes(500) == (
        Pass(0, 1, 500),
        Pass(1, 3, 64),
    )


def test_a_prompt_chooses_no_token_at_its_end_where_the_next_is_known() -> None:
    path = Staged(staged(*THREE), 60, 64)
    assert path.completes(0, 60, 60)
    assert not path.completes(0, 60, 61)


def test_the_parts_of_a_plan_are_laid_out_as_the_whole() -> None:
    plan = staged(*THREE, split=True)
    seen = []
    for stage in range(3):
        part, first = plan.part(stage), plan.index.layers_of(stage)[0]
        seen += [
            dataclasses.replace(lane, layer=lane.layer + first) for lane in part.lanes
        ]
        for i, bucket in enumerate(plan.index.buckets_of(stage)):
            assert (
                CacheLayout(part).page_stride[i]
                == CacheLayout(plan).page_stride[bucket]
            )
            ours, theirs = (
                CacheLayout(part).lane_table(i),
                CacheLayout(plan).lane_table(bucket),
            )
            np.testing.assert_array_equal(ours[:, 1:], theirs[:, 1:])
            np.testing.assert_array_equal(ours[:, 0] + first, theirs[:, 0])
    assert tuple(seen) == plan.lanes


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((Stage(1), Stage(2, 64)), "begin at the layers"),
        ((Stage(0, 64), Stage(2, 64)), "begin at the layers"),
        ((Stage(0), Stage(2, 64), Stage(2, 64)), "begin at the layers"),
        ((Stage(0), Stage(9, 64)), "begin at the layers"),
        ((Stage(0), Stage(1, 64), Stage(2, 96)), "no token comes back"),
        ((Stage(0), Stage(1, 8)), "more than the 8 last ones stay"),
    ],
)
def test_stages_that_cannot_be_are_refused(
    stages: tuple[Stage, ...], said: str
) -> None:
    with pytest.raises(KvlatheError, match=said):
        dataclasses.replace(staged(Stage(0)), stages=stages)


def test_a_bucket_of_two_stages_is_refused() -> None:
    with pytest.raises(KvlatheError, match="one stage"):
        dataclasses.replace(staged(Stage(0)), stages=THREE)


# -- running ---------------------------------------------------------------------------
def attended_by_the_last(
    q: npt.NDArray[np.float64], k: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """q [n, Hq, d], k [n, H, d] -> [n], what the last 8 rows' softmax gives each row,
    over all heads."""
    n, found = len(q), np.zeros(len(q))
    for row in range(n - 8, n):
        for head in range(SHAPE.query_heads):
            scores = (
                k[: row + 1, head // SHAPE.group_size]
                @ q[row, head]
                * SHAPE.head_dim**-0.5
            )
            shares = np.exp(scores - scores.max())
            found[: row + 1] += shares / shares.sum()
    return found


def reference(
    plan: CompressionPlan, ids: Items[int], prompt: int
) -> npt.NDArray[np.float32]:
    """Next-token logits of the prompt's last token and all later ones: the original
    model's layers on the rows that are still there, and the last 8 prompt tokens'
    attention spelled out."""
    checkpoint, at = Checkpoint(MODEL), torch.arange(len(ids))
    x, rest = embed(checkpoint, torch.tensor(ids), at), len(ids) - prompt
    enters = {stage.first_layer: stage.tokens for stage in plan.stages}
    q = k = np.zeros(0)
    for layer in range(SHAPE.layers):
        n = len(at) - rest
        if 0 < enters.get(layer, 0) < n:
            kept = sorted(
                np.argsort(-attended_by_the_last(q[:n], k[:n])[: n - 8])[
                    : enters[layer] - 8
                ]
            )
            rows = torch.tensor([*kept, *range(n - 8, len(at))])
            x, at = x[rows], at[rows]
        x, *seen = LayerRunner(checkpoint, layer)(x, at)
        q, k = (tensor.double().numpy() for tensor in seen[:2])
    weight = checkpoint.weight("norm.weight")
    x = x[len(at) - rest - 1 :]
    x = (
        x
        * torch.rsqrt(
            x.square().mean(-1, keepdim=True) + checkpoint.spec.family.norm_eps
        )
        * weight
    )
    return (x @ checkpoint.weight("embed.weight").T).numpy()


def test_a_stage_keeps_the_last_rows_and_those_of_most_mass() -> None:
    assert survivors(np.array([0.1, 5.0, 0.2, 3.0, 0.0, 0.0]), 4, 2).tolist() == [
        1,
        3,
        4,
        5,
    ]
    assert survivors(np.array([1.0, 1.0, 1.0, 0.0]), 3, 1).tolist() == [0, 1, 3]


SESSIONS = [OrtSession, NativeSession]


def available(kind: type[OrtSession]) -> type[OrtSession]:
    if kind is NativeSession and native.find().native is None:
        pytest.skip(native.find().reason)
    return kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", SESSIONS)
def test_a_staged_prompt_and_its_decode_are_the_models_layers_on_the_rows_that_stay(
    kind: type[OrtSession],
) -> None:
    plan = staged(*THREE, split=True)
    ids = text(530)
    found = engine(plan, available(kind)).logits(ids, range(519, 530))
    np.testing.assert_allclose(found, reference(plan, ids, 520), atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SESSIONS)
def test_stages_that_keep_everything_are_the_single_graph(
    kind: type[OrtSession],
) -> None:
    plan = staged(Stage(0), Stage(2, 1024), Stage(3, 300))
    found = engine(plan, available(kind)).logits(text(300), range(290, 300))
    np.testing.assert_allclose(
        found, at_once(300)[290:], atol=1e-5 * np.abs(at_once(300)).max()
    )


@pytest.mark.slow
def test_dropped_rows_are_not_computed_and_the_rows_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, computed = staged(*THREE, split=True), [0, 0, 0]
    run = Graph.run

    def counted(graph: Graph, step, source):  # noqa: ANN001, ANN202
        computed[graph.stage] += len(step.input_ids)
        return run(graph, step, source)

    monkeypatch.setattr(Graph, "run", counted)
    llm = engine(plan)
    [answer] = llm.generate(
        [list(text(700))], SamplingParams(max_new_tokens=3, ignore_eos=True)
    )
    assert computed == [702, 98, 66]  # the prompt's rows and two decoded tokens
    assert answer.prompt_rows == [700, 96, 96, 64]
    assert llm.pool.bytes_in_use == 0


def test_the_graphs_share_their_weights_and_hold_their_own_layers() -> None:
    folder = folder_of(staged(*THREE, split=True).to_json())
    names = []
    for i, layers in enumerate([{"0"}, {"1", "2"}, {"3"}]):
        model = onnx.load(folder / f"model.g{i}.onnx", load_external_data=False)
        external = {
            x.name: {e.key: e.value for e in x.external_data}
            for x in model.graph.initializer
            if x.external_data
        }
        assert {
            name.split(".")[1] for name in external if name.startswith("layers.")
        } == layers
        assert {places["location"] for places in external.values()} == {
            "model.onnx.data"
        }
        names.append({name: places["offset"] for name, places in external.items()})
    assert (
        names[0]["embed.weight"] == names[2]["embed.weight"]
        and "embed.weight" not in names[1]
    )


def test_a_staged_sequence_does_not_depend_on_its_neighbours() -> None:
    plan, params = (
        staged(*THREE, split=True),
        SamplingParams(max_new_tokens=12, ignore_eos=True),
    )
    prompts = [
        list(text(n, start)) for n, start in ((640, 0), (50, 900), (900, 300), (80, 40))
    ]
    single = engine(plan)
    alone = [single.generate([prompt], params)[0].token_ids for prompt in prompts]
    together = engine(plan, tokens=12000)
    sequences = [together.sequence(list(prompt), params) for prompt in prompts]
    for i, sequence in enumerate(
        sequences
    ):  # each arrives while the others are at some stage or decoding
        together.engine.scheduler.add(sequence)
        for _ in range(i + 1):
            together.engine.step()
    while not all(sequence.finish_reason for sequence in sequences):
        together.engine.step()
    assert [sequence.answer for sequence in sequences] == alone
    assert together.pool.bytes_in_use == 0


def test_rows_that_find_no_memory_to_enter_a_stage_cost_nobody_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = staged(*THREE, split=True)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    prompts = [list(text(n, start)) for n, start in ((200, 0), (200, 900))]
    llm = engine(plan)
    expected = [one.token_ids for one in llm.generate(prompts, params)]
    stay, failed = HostRows.stay, [0]

    def once(rows: HostRows, count: int, last: int) -> HostRows:
        if not failed[0]:
            failed[0] = count
            raise MemoryError
        return stay(rows, count, last)

    monkeypatch.setattr(HostRows, "stay", once)
    answers = llm.generate(prompts, params)
    assert failed[0]
    assert [one.token_ids for one in answers] == expected
    assert llm.pool.bytes_in_use == 0


# -- with token budgets ----------------------------------------------------------------
def budgeted(budget: int, *stages: Stage) -> CompressionPlan:
    plan = staged(*stages, split=True)
    life = Budget(budget, recent=16)
    groups = tuple(dataclasses.replace(group, life=life) for group in plan.groups)
    return dataclasses.replace(
        plan, groups=groups, score=ObservationWindow(last=8, accumulated=False)
    )


@pytest.mark.nightly
def test_a_budget_as_long_as_the_text_is_the_uncompressed_model() -> None:
    found = engine(budgeted(320, Stage(0), Stage(2, 320))).logits(
        text(300), range(200, 300)
    )
    np.testing.assert_allclose(
        found, at_once(300)[200:], atol=1e-5 * np.abs(at_once(300)).max()
    )


@pytest.mark.nightly
def test_budgets_hold_in_every_stage_and_neighbours_change_nothing() -> None:
    plan, params = (
        budgeted(128, Stage(0), Stage(2, 320)),
        SamplingParams(max_new_tokens=40, ignore_eos=True),
    )
    prompts = [
        list(text(n, start))
        for n, start in ((640, 0), (50, 900), (900, 300), (330, 40))
    ]
    single = engine(plan)
    alone = [single.generate([prompt], params)[0].token_ids for prompt in prompts]
    together, held = engine(plan, tokens=12000), []
    sequences = [together.sequence(list(prompt), params) for prompt in prompts]
    for i, sequence in enumerate(sequences):
        together.engine.scheduler.add(sequence)
        for _ in range(2 * i + 1):
            together.engine.step()
    while not all(sequence.finish_reason for sequence in sequences):
        together.engine.step()
        held += [max(s.table.lengths) for s in sequences if s.decoding]
    assert [sequence.answer for sequence in sequences] == alone
    assert max(held) < 128 + 2 * plan.page_tokens and together.pool.bytes_in_use == 0
