"""A plan is measured before it is written: the text for it, the time, and what follows
from what was found.

With order.py, job.py, planning.py, pricing.py and build.py the only module of engines/
that calls export's verbs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.base.package import DATA
from kvlathe.base.tokenizer_files import has_backend
from kvlathe.engines.order import Order
from kvlathe.engines.phases import phase
from kvlathe.engines.pricing import calibrated_on, exam_of, sources_of
from kvlathe.plan.measurement import UNMEASURED, Measurement
from kvlathe.tasks.held_out import HeldOut
from kvlathe.tasks.tasks import FolderEncoder

if TYPE_CHECKING:
    from kvlathe.engines.planning import Planned
    from kvlathe.export.calibration.stats import Stats
    from kvlathe.export.model.checkpoint import Checkpoint

MOST_SECONDS = 60.0
"""Time of a measurement of a model of MANY weights and more, where SHARE of the build
is less; of smaller ones less, by the root of their size, down to LEAST_SHARE of it."""
MANY = 2.5e8
LEAST_SHARE = 0.1
SHARE = 0.2
"""Share of the whole build's time that a measurement may take."""
HELD_OUT = "eval_text.jsonl"
"""The file of this project that nothing is decided on."""


def measured(
    order: Order, checkpoint: Checkpoint, planned: Planned, spent: float
) -> Measurement | None:
    """The losses of a plan; None where the order does not want them, of a layer that
    guesses, or where memory does not suffice. ``spent``: seconds
    of the build so far. Raises KvlatheError for a plan that loses more than the order
    allows, before anything is written."""
    config = order.config
    if config.mtp or not config.measure:
        return None
    from kvlathe.export.methods.remedy import remedy
    from kvlathe.measuring.measure import measure

    log.info("measuring what the plan loses")
    with phase("measuring"):
        held_out = held_out_of(order, checkpoint, planned.stats)
        seconds = config.measure_seconds
        if seconds is None:
            seconds = max(_seconds(checkpoint), spent * SHARE / (1 - SHARE))
        made = planned.plan, planned.basis
        brief = order.compression.removes_nothing
        found = measure(checkpoint, made, held_out, seconds, config.seed, brief)
    if found is not None:
        found = dataclasses.replace(found, remedy=remedy(order.compression))
    check_kl(found, config.max_kl, config.compression)
    if found is not None and found.breaks:
        log.warning("%s", found.warning)
    if found is not None and (found.is_short or found.is_idle) and not brief:
        log.warning(
            "%s tokens say %s of a longer cache: --measure-seconds %.0f gives the "
            "measurement more time than it had",
            f"{found.whole.tokens:,}",
            "nothing" if found.is_idle else "little",
            _more_seconds(found),
        )
    return found


def _more_seconds(found: Measurement) -> float:
    return max(MOST_SECONDS, 4 * found.seconds)


def tell(found: Measurement | None) -> None:
    """Say at a build's end what its plan loses."""
    log.info("%s", UNMEASURED if found is None else found.line)


def check_kl(found: Measurement | None, most: float | None, compression: str) -> None:
    """Raise KvlatheError for a plan that loses more than ``most``, or of which nobody
    knows."""
    if most is None:
        return
    if found is None:
        raise KvlatheError(
            f"--max-kl {most:g} cannot be used with {compression} here",
            "there is too little memory to measure it",
            "build where the whole model fits in float32",
        )
    if found.is_idle:
        raise KvlatheError(
            f"--max-kl {most:g} cannot be held to by {compression} here",
            f"the {found.whole.tokens:,} tokens that there was time for are too few for "
            "the plan to remove any",
            f"give --measure-seconds {_more_seconds(found):.0f}",
        )
    if found.most_kl <= most:
        return
    worst = max(found.lengths, key=lambda one: one.kl)
    raise KvlatheError(
        f"{compression} loses more than --max-kl {most:g} allows",
        f"{worst.words} at {worst.tokens:,} tokens of {found.text}",
        found.remedy,
    )


def _seconds(checkpoint: Checkpoint) -> float:
    """Time that a measurement may take, however short the build is."""
    from kvlathe.export.model.tensors import stored_shapes

    weights = sum(math.prod(shape) for shape in stored_shapes(checkpoint.spec).values())
    return MOST_SECONDS * min(1.0, max(LEAST_SHARE, (weights / MANY) ** 0.5))


def held_out_of(order: Order, checkpoint: Checkpoint, stats: Stats | None) -> HeldOut:
    """Text that neither the order's statistics nor its prices have read."""
    has_tokens = has_backend(checkpoint.path)
    return HeldOut(
        _files(order, stats),
        FolderEncoder(checkpoint.path) if has_tokens else None,
        checkpoint.spec.vocab_size,
        _read(order, checkpoint),
        order.config.seed,
    )


def _files(order: Order, stats: Stats | None) -> Sequence[Path]:
    """Texts to measure on: the user's own first, of which some may be left unread."""
    config = order.config
    given = [Path(name) for name in (config.calibration, config.text) if name]
    own = [path for path in given if path.is_file() and path.parent != DATA]
    files = list(dict.fromkeys([*own, DATA / HELD_OUT]))
    # Statistics that come in a file name the text they were taken on, and no more.
    known = stats.source.get("source") if config.stats and stats else ""
    return [path for path in files if path.is_file() and path.name != known]


def _read(order: Order, checkpoint: Checkpoint) -> list[Sequence[int]]:
    """The text that statistics and prices have read, as token ids."""
    config, compression = order.config, order.compression
    read = calibrated_on(order, checkpoint)
    if compression.measured or compression.measures_heads:
        exams = sources_of(config, checkpoint).exams
        read += itertools.chain.from_iterable(exam.windows for exam in exams)
    elif config.accuracy is not None and config.metric != "retrieval":
        read += exam_of(order, checkpoint).windows
    return read
