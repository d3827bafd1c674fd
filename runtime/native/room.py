"""Whether the GPU of this machine has the shared memory that a plan needs.

``python -m kvlathe.runtime.native.room PLAN_FILE`` is how a build asks, in a child
process. It prints nothing where it has, and where this machine has no GPU or no kernels
for one. Else fact, reason and remedy, as JSON.
"""

from __future__ import annotations

import json
import sys
from ctypes import byref
from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.base.kernel_limits import kernel_limits
from kvlathe.plan.kernel_forms import plan_refusal
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import F16, AttendDecodeArgs, CudaLibrary, LayerForm
from kvlathe.runtime.native.library import ABI_VERSION, find


def check_room(library: CudaLibrary, plan: CompressionPlan) -> None:
    """Raise KvlatheError where the kernels may not read pages of ``plan``, or this GPU
    lacks the shared memory to attend a layer of it (docs/native.md)."""
    refusal = plan_refusal(plan)
    if refusal:
        raise KvlatheError("the CUDA kernels cannot run this plan", *refusal)
    try:
        check_layers(library, plan)
    except KvlatheError as error:
        raise KvlatheError(
            "this engine does not run on this GPU", error.reason, _less_room(plan)
        ) from error


def check_layers(library: CudaLibrary, plan: CompressionPlan, flags: int = 0) -> None:
    """Raise KvlatheError where this GPU cannot attend some layer of ``plan`` in calls
    with ``flags``."""
    layout = CacheLayout(plan)
    for layer in (x for x in range(plan.model.layers) if plan.index.active(x)):
        form = LayerForm(library, layout, layer)
        sizes = (
            ABI_VERSION,
            F16,
            0,
            form.group,
            plan.page_tokens,
            len(form.parts),
        )
        args = AttendDecodeArgs(*sizes, 1.0)
        args.parts, args.q_stride, args.o_stride = form.parts, form.queries, form.out
        # Any bound: of nothing, a call is checked alike with sink logits.
        args.softcap = plan.model.softcap or float(plan.model.sinks)
        args.flags = flags
        library.call("cuda_attend_decode", byref(args))


def _less_room(plan: CompressionPlan) -> str:
    """The remedy: settings that make tiles smaller."""
    least = kernel_limits()["kLeastCodedPage"]
    pages = ""
    if plan.page_tokens > least:
        pages = f"build with --tokens-per-block {least}, "
    return f"{pages}compress more, build with fewer bits, or run an onnxruntime engine with --device cpu"


def refusal(plan: CompressionPlan) -> KvlatheError | None:
    """The refusal of this machine's GPU for a plan; None where it takes the plan, or
    where there is no GPU."""
    native = find().native
    if native is None or not native.cuda:
        return None
    library = CudaLibrary(native)
    try:
        library.workspace_bytes(1, 1)
    except KvlatheError:  # no device
        return None
    try:
        check_room(library, plan)
    except KvlatheError as error:
        return error
    return None


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text("utf-8")
    if said := refusal(CompressionPlan.from_json(text)):
        print(json.dumps([said.fact, said.reason, said.remedy]))
