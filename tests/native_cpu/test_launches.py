"""Launches of decode attention on GPUs that nobody here has: the host's own code,
told their limits; and what the compiled kernels take, where there is a CUDA build."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping
from ctypes import byref
from pathlib import Path

import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Bits, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import KEEP, SEAL
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import BUNDLES
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.native.room import check_room
from tests.native.codes_problem import CodesProblem
from tests.native.library import AttendDecodeArgs
from tests.native.problem import Problem
from tests.support.attend_cases import plan_of
from tests.support.emulated import AttentionLibrary, emulated_kernels
from tests.support.gpus import GPUS, KIB, Gpu

ROOT = Path(__file__).resolve().parents[2]
STATIC = {True: 2944, False: 1920}
"""Bytes of static shared memory of the kernels of decode attention as compiled, from
9.0 on and before it. cuobjdump --dump-resource-usage says them."""
OF_CODES = {False: 3328, True: 2432}
"""The most that those for codes take beside that, of single rows and with bundles: what
each warp parks there."""
OF_BUNDLES = 512
"""The bytes that calls with bundles take beside that."""
MIXED = [(16, 96), (96, 16), (32, 48), (64, 64), (48, 32), (80, 16), (16, 16), (96, 96)]
WHOLE = [(128, 128)] * 8
MOST_STACK = 272
"""Bytes of a thread's stack: arrays that are indexed, and the few registers that are
spilled. In none of the inner loops of the kernels that were timed."""
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Limits(ctypes.Structure):
    """``Gpu`` of launches.cc."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "major",
            "sms",
            "shared_per_sm",
            "shared_per_block",
            "shared_reserved",
            "static_shared",
        )
    ]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated_kernels(tmp_path_factory.mktemp("host"), "launches", "-O0")


def static_bytes(gpu: Gpu, args: AttendDecodeArgs) -> int:
    coded = any(args.parts[i].bits_k < 16 for i in range(args.part_count))
    bundled = bool(args.flags & BUNDLES)
    static = STATIC[gpu.major >= 9] + (OF_BUNDLES if bundled else 0)
    return static + (OF_CODES[bundled] if coded else 0)


def launch(
    host: ctypes.CDLL, gpu: Gpu, args: AttendDecodeArgs
) -> tuple[int, int, int] | None:
    """Blocks, warps of each, and bytes of its dynamic shared memory; None where the
    host refuses."""
    limits = Limits(
        gpu.major,
        gpu.sms,
        gpu.shared_per_sm,
        gpu.shared_per_block,
        gpu.shared_reserved,
        static_bytes(gpu, args),
    )
    found = (ctypes.c_int32 * 3)()
    if host.launch_of(byref(args), byref(limits), found):
        return None
    return found[0], found[1], found[2]


Key = tuple[Bits, str, int, int]
"""Bits, ranks, query heads of a KV head, tokens of a page."""


def problems() -> dict[Key, Problem | CodesProblem]:
    """Problems of every width, ranks, groups of query heads and pages."""
    found: dict[Key, Problem | CodesProblem] = {}
    coded: tuple[Bits, ...] = (8, 4, 2)
    shapes = itertools.product(
        (("mixed", MIXED), ("whole", WHOLE)), (1, 4, 8), (64, 128)
    )
    for (said, ranks), group, page in shapes:
        whole = Problem([ranks], [100], group, page_tokens=page)
        found[16, said, group, page] = whole
        for bits in coded:
            tiers = [Tier(bits, bits, arithmetic="int")]
            one = CodesProblem([ranks], [[page]], [5], tiers, group, page_tokens=page)
            found[bits, said, group, page] = one
    return found


@pytest.fixture(scope="module")
def cases() -> dict[Key, Problem | CodesProblem]:
    return problems()


LARGEST: set[Key] = {(8, "whole", 8, 128)}
OF_163: set[Key] = {(4, "whole", 8, 128), (8, "mixed", 8, 128), (8, "whole", 8, 64)}
OF_99: set[Key] = {
    (2, "whole", 8, 64),
    (2, "whole", 8, 128),
    (4, "mixed", 8, 128),
    (4, "whole", 8, 64),
    (8, "mixed", 4, 128),
    (8, "mixed", 8, 64),
    (8, "whole", 4, 128),
}
OF_64: set[Key] = {
    (16, "whole", 8, 64),
    (16, "whole", 8, 128),
    (2, "mixed", 8, 64),
    (2, "mixed", 8, 128),
    (4, "mixed", 4, 128),
    (4, "mixed", 8, 64),
    (4, "whole", 4, 128),
    (8, "mixed", 4, 64),
    (8, "whole", 1, 128),
    (8, "whole", 4, 64),
}
TOO_LARGE = {
    227 * KIB: LARGEST,
    163 * KIB: LARGEST | OF_163,
    99 * KIB: LARGEST | OF_163 | OF_99,
    64 * KIB: LARGEST | OF_163 | OF_99 | OF_64,
}
"""By the shared memory of a block, what the host refuses in words: there two warps hold
no tile. These lists only shrink (docs/performance.md has them)."""


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_decode_launches_fit_every_gpu_but_for_known_plans(
    host: ctypes.CDLL, cases: dict[Key, Problem | CodesProblem], gpu: Gpu
) -> None:
    """A block has its share of a multiprocessor's memory and threads. What is too large
    is known."""
    assert refused_of(host, gpu, cases) == TOO_LARGE[gpu.shared_per_block]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_launches_with_bundles_fit_the_gpu(
    host: ctypes.CDLL, cases: dict[Key, Problem | CodesProblem], gpu: Gpu
) -> None:
    """A problem that is too large for them is attended row by row
    (`Attention.most_bundled`)."""
    small = gpu.shared_per_block == 64 * KIB
    wide = [(8, "mixed"), (8, "whole"), (4, "whole")]
    pages_of_128 = {key for key in cases if key[:2] in wide and key[3] == 128}
    refused = refused_of(host, gpu, cases, BUNDLES)
    assert refused == (pages_of_128 if small else set())


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_launches_whose_warps_attend_alone_fit_the_gpu(
    host: ctypes.CDLL,
    cases: dict[Key, Problem | CodesProblem],
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take less than others: nothing that is too large for them only is
    refused."""
    monkeypatch.setenv("KVLATHE_ALONE_PAIRS", "0")
    coded = {key: case for key, case in cases.items() if key[0] < 16}
    refused = refused_of(host, gpu, coded, workspace=1 << 30)
    assert refused <= TOO_LARGE[gpu.shared_per_block]


def refused_of(
    host: ctypes.CDLL,
    gpu: Gpu,
    cases: Mapping[Key, Problem | CodesProblem],
    flags: int = 0,
    workspace: int = 0,
) -> set[Key]:
    """The cases that the host refuses there. All others fit."""
    refused: set[Key] = set()
    for name, problem in cases.items():
        args = problem.args()
        args.flags, args.workspace_bytes = flags, workspace
        found = launch(host, gpu, args)
        if found is None:
            refused.add(name)
            continue
        grid, warps, dynamic = found
        blocks = grid // gpu.sms
        whole = dynamic + static_bytes(gpu, args)
        assert grid == blocks * gpu.sms and blocks >= 1
        assert whole <= gpu.shared_per_block
        assert blocks * (whole + gpu.shared_reserved) <= gpu.shared_per_sm
        assert warps >= 2 and blocks * warps * 32 <= gpu.threads_per_sm
    return refused


def plan_at(key: Key) -> CompressionPlan:
    """One layer of such heads; codes behind 16-bit pages."""
    bits, said, group, page = key
    ranks = MIXED if said == "mixed" else WHOLE
    lanes = [Lane(0, h, 128, *pair, projected=True) for h, pair in enumerate(ranks)]
    every = tuple(range(len(lanes)))
    cold = (Tier(bits, bits, arithmetic="int"),) if bits < 16 else ()
    own = Group(every, Tier(16, 16), cold, SEAL if cold else KEEP)
    return plan_of(lanes, [own], 128, group, page)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_an_engine_that_a_gpu_is_too_small_for_is_not_loaded(
    host: ctypes.CDLL,
    native: Native,
    cases: dict[Key, Problem | CodesProblem],
    gpu: Gpu,
) -> None:
    """The refusal says what no step of it could be launched for, and what to do."""
    launch(host, gpu, next(iter(cases.values())).args())  # the GPU from now on
    library = AttentionLibrary(native, host)
    refused: set[Key] = set()
    for key in cases:
        try:
            check_room(library, plan_at(key))
        except KvlatheError as error:
            refused.add(key)
            assert "shared memory" in error.reason
            smaller = "--tokens-per-block 64" in error.remedy
            assert smaller == (key[3] == 128) and "fewer bits" in error.remedy
    assert refused == TOO_LARGE[gpu.shared_per_block]


WIDE: dict[tuple[Bits, int], int] = {
    (16, 256): 64,
    (8, 256): 64,
    (4, 256): 64,
    (16, 512): 64,
    (8, 512): 99,
    (4, 512): 99,
}
"""By bits and ranks: KiB of shared memory of a block that are enough for pages of 64
tokens."""


@pytest.mark.parametrize("team", ["0", "1000000"])
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_launches_of_wide_ranks_fit_gpus_with_room_for_their_tiles(
    host: ctypes.CDLL, gpu: Gpu, team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLATHE_TEAM_COLUMNS", team)
    for (bits, rank), least in WIDE.items():
        ranks = [[(rank, rank)] * 2]
        problem: Problem | CodesProblem = Problem(ranks, [100], 4)
        if bits < 16:
            problem = CodesProblem(ranks, [[64]], [5], [Tier(bits, bits)], 4)
        for flags in (0, BUNDLES):
            args = problem.args()
            args.flags, args.workspace_bytes = flags, 1 << 30
            found = launch(host, gpu, args)
            if found is None:
                assert gpu.shared_per_block < least * KIB
                continue
            grid, warps, dynamic = found
            blocks = grid // gpu.sms
            most = 12 if bits == 16 else 8  # their registers are all that there are
            assert warps >= 1 and blocks * warps <= most
            whole = dynamic + static_bytes(gpu, args)
            assert blocks * (whole + gpu.shared_reserved) <= gpu.shared_per_sm


def test_a_gpu_before_ampere_has_no_bfloat16(host: ctypes.CDLL) -> None:
    problem = Problem([MIXED], [100], 4, dtype=torch.bfloat16)
    able = {gpu.name: launch(host, gpu, problem.args()) for gpu in GPUS}
    assert able.pop("T4") is None and all(able.values())


def builds() -> list[Path]:
    """Objects of scripts/compile_all_archs.sh, and a library with CUDA kernels."""
    found = sorted(ROOT.glob("build/archs/*/src/cuda/**/*.cu.o"))
    library = ROOT / "build" / "native" / "libkvlathe.so"
    return [*found, library] if library.is_file() else found


def test_compiled_kernels_take_what_every_gpu_has() -> None:
    """Registers, static shared memory, and a stack of a stated few bytes."""
    if shutil.which("cuobjdump") is None:
        pytest.skip("cuobjdump is not installed: compiled kernels cannot be read")
    seen = 0
    for path in builds():
        command = ["cuobjdump", "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True).stdout
        for match in USAGE.finditer(said):
            registers, stack, shared, local = map(int, match.groups())
            assert registers <= 255 and local == 0 and stack <= MOST_STACK
            assert shared <= 8 * KIB
            seen += 1
    if not seen:
        pytest.skip("there is no CUDA build: scripts/compile_all_archs.sh makes one")
