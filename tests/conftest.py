"""Fixtures that several test files share."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvlathe.engines import measuring
from kvlathe.plan.kernel_forms import UNPROVEN
from tests.support.made_once import run_folder

QUICK_EXAMPLES = 20
"""Examples of a law that names no number of its own, with --quick; else 100."""

settings.register_profile(
    "kvlathe", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "kvlathe-quick", settings.get_profile("kvlathe"), max_examples=QUICK_EXAMPLES
)
settings.load_profile("kvlathe")
"""A machine with other work may take any time for an example."""

os.environ.setdefault(UNPROVEN, "1")
"""What the tests are to prove is not refused to them."""

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell runs what is in its background with interrupts ignored; processes that tests
interrupt would inherit that."""


SETTINGS = "_hypothesis_internal_use_settings"
EXIT_SECONDS = 120
_stderr = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="each test that is not slow once, with its first parameters",
    )
    parser.addoption(
        "--examples",
        type=int,
        default=1,
        metavar="TIMES",
        help="so many times the examples of each law",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """With --quick a law is tried once: the first parameters of its test stay."""
    more_examples(items, int(config.getoption("--examples") or 1))
    if not config.getoption("--quick"):
        return
    kept: dict[str, pytest.Item] = {}
    for item in items:
        law = item.nodeid.partition("[")[0]
        if item.get_closest_marker("slow") is None:
            kept.setdefault(law, item)
    first = set(kept.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in first])
    items[:] = kept.values()


def more_examples(items: list[pytest.Item], times: int) -> None:
    """So many times the examples that each law names, or has without a number."""
    laws = {item.function for item in items if isinstance(item, pytest.Function)}
    for law in laws if times > 1 else ():
        if own := getattr(law, SETTINGS, None):
            most = own.max_examples * times
            setattr(law, SETTINGS, settings(own, max_examples=most))


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is captured yet, and no worker has started."""
    if config.getoption("--quick"):
        settings.load_profile("kvlathe-quick")
    global _stderr
    _stderr = os.dup(_stderr)
    run_folder()


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: the garbage collector need not look at them
    again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """A process that does not end after its last test says where it hangs, and ends."""
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=_stderr)


@pytest.fixture(scope="session", autouse=True)
def builds_measure_little() -> Iterator[None]:
    """Builds of tests are about other things: each measures its plan on the fewest
    tokens. What a measurement says is tested in tests/measuring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "MOST_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """``reference(name)`` -> (folder, transformers model) of the checkpoint
    FAMILIES[name], made once a session.

    The folder is shared: tests read it only.
    """
    checkpoints = pytest.importorskip("tests.support.checkpoints")

    @cache
    def made(name: str) -> tuple[Path, object]:
        folder = tmp_path_factory.mktemp(name)
        return folder, checkpoints.make(folder, name)

    return made


class _Kept(logging.Handler):
    """Keeps what is logged, a line a record."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines that kvlathe logs, each record once.

    The command line keeps its log from the root logger, and pytest reads such loggers
    in its own way: what caplog holds depends on the tests before.
    """
    log, kept = logging.getLogger("kvlathe"), _Kept()
    level = log.level
    log.addHandler(kept)
    log.setLevel(logging.INFO)  # whatever the commands of tests before have said
    yield kept.lines
    log.setLevel(level)
    log.removeHandler(kept)
