"""The CUDA kernels' reading of every form of codes (plugins_cpp/src/cuda/forms.cuh), run
lane by lane on a CPU, is that of kvlathe/plan/codec.py."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvlathe.plan.codec import matrices
from kvlathe.plan.formats import Format, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layer_table import format_fields
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from tests.support.attend_cases import plan_of
from tests.support.mixed_cases import FLOATS

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "plugins_cpp"
RANKS = [(16, 32), (48, 112), (128, 80)]
TIERS = [
    Tier(8, 8),
    Tier(4, 4, group_k=32),
    Tier(2, 2, group_k=48, group_v=32),
    Tier(3, 3),
    Tier(3, 3, "token", "rank", 32, 48),
    Tier(8, 4, "token", "rank", 64, 32),
    Tier(2, 16, "token", "rank", 16, 16),
    Tier(16, 4, "rank", "rank"),
    *(Tier(b, b, "rank", "rank", coding_k="normal", coding_v="normal") for b in (4, 3)),
    Tier(2, 3, "rank", "token", 32, 64, coding_k="normal"),
    *FLOATS,
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    path = tmp_path_factory.mktemp("forms") / "convert"
    folders = (HERE / "emulated", SOURCES / "src", SOURCES / "include")
    includes = [f"-I{folder}" for folder in folders]
    source = HERE / "emulated" / "convert_forms.cc"
    command = [compiler, "-std=c++17", *includes, str(source), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "_Float16" in done.stderr:
        pytest.skip("this g++ has no halves")
    assert done.returncode == 0, done.stderr
    return path


def converted(program: Path, numbers: list[int], slab: bytes) -> np.ndarray:
    words = " ".join(map(str, (*numbers, len(slab), *slab)))
    done = subprocess.run(
        [program], input=words, capture_output=True, text=True, check=True
    )
    return np.array([float(word) for word in done.stdout.split()])


def without_unread(halves: np.ndarray, form: Format, page: int, valid: int) -> int:
    """Make NaN of the metadata of tokens from ``valid`` on, which nobody has copied.
    Returns from where on rows are zeros: along the tokens they are converted in
    eights."""
    if not form.along_tokens:
        halves.reshape(page, -1)[valid:] = np.nan
        return valid
    first = -(-valid // form.group)
    of_groups = halves.reshape(-1, page // form.group, 2)
    of_groups[:, first:] = np.nan
    return -(-valid // 8) * 8


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("tier", TIERS, ids=str)
def test_codes_become_the_numbers_that_they_mean(
    program: Path, tier: Tier, page: int
) -> None:
    lanes = [Lane(0, h, 128, *ranks, projected=True) for h, ranks in enumerate(RANKS)]
    groups = [Group((0, 1, 2), Tier(16, 16), (tier,), SEAL)]
    layout = CacheLayout(plan_of(lanes, groups, 128, 2, page))
    rng = np.random.default_rng(page)
    fields = format_fields(tier)
    valid = page // 2 - 21
    for lane, pair in matrices(layout, 1).items():
        memory = np.zeros(layout.page_stride[1], np.uint8)
        offsets = layout.lane_offsets(1, lane)
        places = ((offsets.k, offsets.k_meta), (offsets.v, offsets.v_meta))
        for which, (part, form) in enumerate(zip(pair, tier.formats, strict=True)):
            rank = RANKS[lane][which]
            rows = rng.standard_normal((page, rank)).astype(np.float32)
            part.write(memory, rows, 0)
            at, meta = places[which]
            axis = fields[2 + which] if form.is_coded else 0
            numbers = [form.bits, axis, form.group, rank, page, valid]
            slab = memory[at : at + form.element_bytes(rank * page)].tobytes()
            kept = valid
            if form.is_coded:
                groups = layout.lane_table(1)[lane][8 + which]
                end = meta + 2 * form.halves * groups
                halves = memory[meta:end].view(np.float16).copy()
                kept = without_unread(halves, form, page, valid)
                slab += halves.tobytes()
            found = converted(program, numbers, slab).reshape(page, rank)
            wanted = part.read(memory).astype(np.float16).astype(np.float64)
            np.testing.assert_allclose(
                found[:valid], wanted[:valid], rtol=2e-3, atol=2e-3
            )
            assert not found[kept:].any()
