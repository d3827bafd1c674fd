"""Laws of truncated matrix entropy: the paper's formulas spelled out, closed forms,
invariances, votes and trends."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvlathe.base.errors import KvlatheError
from kvlathe.export.calibration import effective_ranks, entropy
from kvlathe.export.calibration.calibrate import calibrate_on, random_sequences
from kvlathe.export.calibration.effective_ranks import Entropies
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.heads import ModelShape
from tests.support.checkpoints import make


def eranks(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return entropy.eranks(torch.from_numpy(x)).numpy()


def spectrum(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return entropy.spectrum(torch.from_numpy(x)).numpy()


def elbow(sigma: npt.NDArray[np.float64]) -> int:
    return int(entropy.elbows(torch.from_numpy(sigma)))


ALL, TOP16 = effective_ranks.truncation("all"), effective_ranks.truncation("16")


def by_the_formula(x: npt.NDArray[np.float64], k: int) -> float:
    """erank_k, Eqs. 1, 9 and 10, one token at a time."""
    sigma = np.zeros((x.shape[1], x.shape[1]))
    mean = x.sum(0) / len(x)
    for row in x:
        unit = (row - mean) / math.sqrt(((row - mean) ** 2).sum())
        sigma += np.outer(unit, unit) / len(x)
    assert abs(np.trace(sigma) - 1) < 1e-12
    top = sorted(np.linalg.eigvals(sigma).real, reverse=True)[:k]
    return math.exp(-sum(value * math.log(value) for value in top if value > 1e-15))


@pytest.mark.parametrize(("n", "d"), [(40, 24), (24, 40), (9, 9)])
def test_effective_ranks_are_the_papers_formula(n: int, d: int) -> None:
    x = np.random.default_rng(n).normal(size=(n, d)) * np.exp(-np.arange(d) / 5) + 3.0
    found = eranks(x)
    assert found[ALL] == pytest.approx(by_the_formula(x, d), rel=1e-9)
    assert found[TOP16] == pytest.approx(by_the_formula(x, 16), rel=1e-9)
    bend = elbow(spectrum(x))
    assert found[effective_ranks.truncation("elbow")] == pytest.approx(
        by_the_formula(x, bend), rel=1e-9
    )


def test_effective_ranks_of_a_line_and_of_equal_axes_are_known() -> None:
    d = 16
    line = np.outer(
        np.linspace(-1, 1, 10), np.arange(1, d + 1)
    )  # every centred row is the same direction, up or down
    assert eranks(line)[ALL] == pytest.approx(1)
    axes = np.concatenate([np.eye(d), -np.eye(d)])  # isotropic: every eigenvalue is 1/d
    np.testing.assert_allclose(spectrum(axes), 1 / d, atol=1e-14)
    assert eranks(axes)[ALL] == pytest.approx(d)
    wide = np.concatenate([np.eye(64), -np.eye(64)])
    assert eranks(wide)[TOP16] == pytest.approx(math.exp(16 / 64 * math.log(64)))
    assert eranks(np.ones((5, d)))[ALL] == 1  # no direction at all


def test_rotation_scale_and_place_of_the_origin_change_nothing() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 12)) * np.exp(-np.arange(12) / 3)
    turn = np.linalg.qr(rng.normal(size=(12, 12)))[0]
    np.testing.assert_allclose(eranks(5 * x @ turn + 7), eranks(x), rtol=1e-9)
    stacked = np.stack([x, 2 * x[::-1]])
    np.testing.assert_allclose(eranks(stacked), np.stack([eranks(x)] * 2), rtol=1e-9)


def test_the_elbow_is_where_a_bent_spectrum_bends() -> None:
    bent = np.array([0.3, 0.25, 0.2, 0.02, 0.019, 0.018, 0.017, 0.016])
    assert elbow(bent) == 3
    assert elbow(np.full(8, 1 / 8)) == 1


def test_votes_count_the_upper_half_of_each_layer_or_of_all_layers() -> None:
    ranks = np.array(
        [
            [[1.0, 4.0, 3.0, 2.0], [9.0, 8.0, 7.0, 6.0]],
            [[5.0, 1.0, 6.0, 2.0], [1.0, 2.0, 3.0, 4.0]],
        ]
    )
    assert effective_ranks.votes(ranks).tolist() == [[1, 1, 2, 0], [1, 1, 1, 1]]
    single = np.array([[[1.0], [4.0], [3.0], [2.0]], [[1.0], [2.0], [3.0], [4.0]]])
    assert effective_ranks.votes(single).tolist() == [[0], [1], [2], [1]]
    assert effective_ranks.votes(ranks[..., :3]).sum(-1).tolist() == [
        2,
        2,
    ]  # of three heads, one is the upper half


def test_a_new_layer_group_begins_where_the_rank_falls_by_more_than_epsilon() -> None:
    assert effective_ranks.drops([5.0, 7.0, 5.5, 5.0, 3.9, 3.9], 1.0) == [2, 4]
    assert effective_ranks.drops([5.0, 7.0, 5.5, 5.0, 3.9, 3.9], 1.2) == [2]
    assert effective_ranks.drops([1.0, 2.0, 3.0], 0.0) == []


def test_the_recent_share_whose_trend_follows_the_whole_wins() -> None:
    rng = np.random.default_rng(1)
    found = Entropies.empty(ModelShape(6, 4, 2, 16, 64, 50, 256), 3)
    found.keys[:] = rng.random((3, 6, 2, 1)) + 1
    found.windows[:] = rng.random(found.windows.shape)
    found.windows[:, :, 3] = (
        0.5 * found.keys.mean(2) + 2
    )  # any rising line of it correlates fully
    best, each = effective_ranks.likest_recent(found, "32")
    assert (
        best == effective_ranks.RECENT[3]
        and each[3] == pytest.approx(1)
        and max(each[:3] + each[4:]) < 0.99
    )
    at = effective_ranks.truncation("32")
    trend, whole = found.windows[:, :, 1, at].mean(0), found.keys[..., at].mean((0, 2))
    assert each[1] == pytest.approx(np.corrcoef(trend, whole)[0, 1])


def test_a_window_keeps_the_newest_and_the_most_attended() -> None:
    attention = torch.tensor([5.0, 0.0, 4.0, 3.0, 0.5, 0.2, 0.1, 0.0])
    assert entropy.window(attention, 4, 0.5).tolist() == [0, 2, 6, 7]
    assert entropy.window(attention, 4, 0.0).tolist() == [0, 2, 3, 4]
    assert entropy.window(attention, 4, 1.0).tolist() == [4, 5, 6, 7]


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Stats, list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder, "qwen2-g7")
    checkpoint = Checkpoint(folder)
    ids = random_sequences(checkpoint.spec.vocab_size, 120, seed=1, length=60)
    return folder, calibrate_on(checkpoint, ids, 0, {}, spread=False), ids


def test_calibration_observes_what_transformers_computes(
    tiny: tuple[Path, Stats, list[torch.Tensor]],
) -> None:
    folder, stats, ids = tiny
    found = stats.entropies
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert found.texts == len(ids) == 2
    for text, tokens in enumerate(ids):
        with torch.inference_mode():
            out = model(
                tokens[None],
                use_cache=True,
                output_attentions=True,
                output_hidden_states=True,
            )
        for layer in range(stats.shape.layers):
            keys = out.past_key_values.layers[layer].keys[0].double().numpy()
            hidden = out.hidden_states[layer][0].double().numpy()
            assert found.hidden[text, layer, TOP16] == pytest.approx(
                by_the_formula(hidden, 16), rel=1e-3
            )
            for head, rows in enumerate(keys):
                assert found.keys[text, layer, head, ALL] == pytest.approx(
                    by_the_formula(rows, 16), rel=1e-3
                )
            seen = (
                out.attentions[layer][0, :, -effective_ranks.LAST :]
                .double()
                .numpy()
                .sum(1)
            )  # [Hq, n]
            lanes = seen.reshape(stats.shape.kv_heads, -1, seen.shape[-1]).sum(1)
            cosine = (
                lanes[0]
                @ lanes[1]
                / np.linalg.norm(lanes[0])
                / np.linalg.norm(lanes[1])
            )
            assert found.likeness[text, layer, 0, 1] == pytest.approx(cosine, rel=1e-4)
            size = max(
                effective_ranks.LAST, round(effective_ranks.WINDOW * len(tokens))
            )
            kept = [sorted(np.argsort(-lane)[:size]) for lane in lanes]
            wanted = np.mean(
                [
                    by_the_formula(rows[at], 16)
                    for rows, at in zip(keys, kept, strict=True)
                ]
            )
            assert found.windows[text, layer, 0, ALL] == pytest.approx(wanted, rel=1e-3)
    assert effective_ranks.lane_eranks(found, "all").shape == (
        2,
        stats.shape.layers,
        stats.shape.kv_heads,
    )
    group = stats.shape.group_size
    mean = found.queries[..., ALL].reshape(2, stats.shape.layers, -1, group).mean(-1)
    np.testing.assert_allclose(effective_ranks.lane_eranks(found, "all"), mean)


def test_entropies_come_back_from_the_file_and_older_files_are_refused(
    tiny: tuple[Path, Stats, list[torch.Tensor]], tmp_path: Path
) -> None:
    stats, path = tiny[1], tmp_path / "stats.npz"
    stats.save(path)
    again = Stats.load(path)
    assert again.digest == stats.digest
    for name, array in stats.entropies.arrays().items():
        np.testing.assert_array_equal(
            again.entropies.arrays()[name], array, err_msg=name
        )
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["header"] = np.array(
        str(arrays["header"]).replace('"schema_version": 3', '"schema_version": 1')
    )
    np.savez(path, **arrays)
    with pytest.raises(
        KvlatheError, match=r"schema version 1, this kvlathe reads 3.*Calibrate again"
    ):
        Stats.load(path)
