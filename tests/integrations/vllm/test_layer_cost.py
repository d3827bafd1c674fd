"""vLLM makes a layer in the first step that runs it, so what that costs is time in
which vLLM stands still. It must not grow with the layers beside it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvlathe.runtime.native.library import Native, find  # noqa: E402
from kvlathe_vllm.cuda import CudaLayer  # noqa: E402
from kvlathe_vllm.hosted import Hosted  # noqa: E402
from kvlathe_vllm.layer import Most  # noqa: E402
from tests.support.block_caches import block_cache  # noqa: E402
from tests.support.block_cases import plan_of  # noqa: E402
from tests.support.host_device import HostLibrary  # noqa: E402

PAGE, BLOCKS = 64, 4
WORKSPACE = 1 << 20


class CountingLibrary(HostLibrary):
    """``counts``: calls by name, but for questions of sizes. It attends nothing."""

    def __init__(self, library: Native) -> None:
        super().__init__(library)
        self.counts: Counter[str] = Counter()

    def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  (structures)
        if name == "cuda_workspace_bytes":
            given[-1]._obj.value = WORKSPACE
            return
        self.counts[name] += 1
        if name == "layer_create":
            super().call(name, *given)


def calls_of_a_layer(native: Native, layers: int) -> Counter[str]:
    """Calls of the library by the last of so many layers when it is made."""
    engine = Hosted(Path("engine"), plan_of(PAGE, layers=layers), {})
    last = layers - 1
    cache = block_cache(engine.blocks[last], BLOCKS)
    library = CountingLibrary(native)
    most = Most(2, 2 * PAGE, 2 * PAGE)
    CudaLayer(engine, last, cache, most, 1.0, torch.float16, library)
    return library.counts


@pytest.mark.parametrize("layers", [3, 9])
def test_a_layer_asks_as_much_of_the_library_whatever_is_beside_it(layers: int) -> None:
    native = find().native
    if native is None:
        pytest.skip("no native library")
    # Layers 0, 2, 8 have the same ranks.
    beside = calls_of_a_layer(native, layers)
    alone = calls_of_a_layer(native, 1)
    assert beside == alone
    assert beside["layer_create"]
