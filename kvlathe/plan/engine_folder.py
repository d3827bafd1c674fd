"""Opening an engine folder: its manifest and its plan, proved to belong together.

Everything that runs, shows or compares an engine reads it through ``open_engine``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.plan import manifest as manifests
from kvlathe.plan.manifest import PLAN_FILE, Manifest
from kvlathe.plan.plan import CompressionPlan, graph_files


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """One that has been verified."""

    path: Path
    manifest: Manifest
    plan: CompressionPlan


def open_engine(folder: Path, deep: bool = True) -> EngineFolder:
    """``deep`` as in ``manifest.verify``.

    Raises KvlatheError where a file is missing, changed or not listed, and where the
    plan is not the one that the manifest names.
    """
    manifest = manifests.verify(folder, deep)
    plan = read_plan(folder)
    _check_belongs(folder, manifest, plan)
    if manifest.backend == "onnxruntime":
        manifests.require_listed(folder, manifest, graph_files(plan))
    return EngineFolder(folder, manifest, plan)


def read_plan(folder: Path) -> CompressionPlan:
    """The plan of an engine folder. Raises KvlatheError where it cannot be read."""
    path = folder / PLAN_FILE
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvlatheError(
            f"{path} cannot be read", str(error), "build the engine again"
        ) from error
    return CompressionPlan.from_json(text)


def _check_belongs(folder: Path, manifest: Manifest, plan: CompressionPlan) -> None:
    said = (manifest.plan_digest, manifest.page_tokens, manifest.prefill_chunk)
    if said != (plan.digest, plan.page_tokens, plan.prefill_chunk):
        raise KvlatheError(
            f"the plan of the engine {folder} is not the one in its manifest",
            "their digests, pages or chunks differ",
            "copy the engine folder again, or build the engine again",
        )
