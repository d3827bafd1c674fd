"""An engine folder appears whole or not at all, whatever ends the process that writes
it."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.folder import appearing, check_file_target, check_target

ROOT = Path(__file__).parents[2]

WRITER = """
import sys, time
from pathlib import Path
from kvlathe.engines.folder import appearing
with appearing(Path(sys.argv[1])) as work:
    (work / "weights").write_bytes(bytes(1000))
    print("writing", flush=True)
    time.sleep(60)
"""


def start_writer(target: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
    return writer


def test_the_folder_appears_only_when_the_block_has_succeeded(tmp_path: Path) -> None:
    target = tmp_path / "new" / "engine"
    with appearing(target) as work:
        (work / "a").write_text("1")
        assert not target.exists() and work.parent == target.parent
    assert (target / "a").read_text() == "1"
    assert list(target.parent.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_nothing_remains_of_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), appearing(tmp_path / "engine") as work:
        (work / "a").write_text("1")
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_writer_cleans_up_and_says_so(
    tmp_path: Path, ending: signal.Signals
) -> None:
    writer = start_writer(tmp_path / "engine")
    writer.send_signal(ending)
    _, err = writer.communicate(timeout=120)
    assert writer.returncode != 0 and "nothing was written to" in err
    assert list(tmp_path.iterdir()) == []


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    target = tmp_path / "[engine]"  # no pattern of file names
    killed = start_writer(target)
    killed.kill()
    killed.wait(20)
    assert len(list(tmp_path.iterdir())) == 1
    with appearing(target):
        assert len(list(tmp_path.iterdir())) == 1  # ours
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_is_being_built_is_refused_before_any_work(
    tmp_path: Path,
) -> None:
    target = tmp_path / "engine"
    living = start_writer(target)
    try:
        with pytest.raises(KvlatheError, match="is being built"), appearing(target):
            pytest.fail("two builds at once")
        assert len(list(tmp_path.iterdir())) == 1  # the living one's
    finally:
        living.kill()
        living.wait(20)


def an_engine(target: Path, *names: str) -> Path:
    """As far as overwriting asks: a manifest that lists ``names``, which exist."""
    target.mkdir()
    for name in names:
        (target / name).write_text("")
    listed = dict.fromkeys(names)
    (target / "manifest.json").write_text(json.dumps({"files": listed}))
    return target


def test_existing_targets_are_refused_and_overwritten_only_if_they_are_engines(
    tmp_path: Path,
) -> None:
    target = tmp_path / "engine"
    target.mkdir()
    (target / "old").write_text("")
    with pytest.raises(KvlatheError, match="exists"):
        check_target(target)
    with pytest.raises(KvlatheError, match="nothing that --overwrite replaces"):
        check_target(target, overwrite=True)
    (target / "old").unlink()
    target.rmdir()
    an_engine(target, "old")
    with appearing(target, overwrite=True) as work:
        (work / "new").write_text("")
        assert (target / "old").exists()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("foreign", ["thesis.tex", "photos/", "old/"])
def test_an_engine_that_holds_what_no_build_wrote_is_not_overwritten(
    tmp_path: Path, foreign: str
) -> None:
    target = an_engine(tmp_path / "engine", "weights")
    (target / foreign).mkdir() if foreign.endswith("/") else (target / foreign).touch()
    name = foreign.strip("/")
    with pytest.raises(KvlatheError, match=rf"no build wrote \({name}\)"):
        check_target(target, overwrite=True)
    assert (target / name).exists() and (target / "weights").exists()


def test_overwriting_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    real = an_engine(tmp_path / "engine-1", "old")
    link = tmp_path / "engine"
    link.symlink_to(real.name)
    with pytest.raises(KvlatheError, match="exists"):
        check_target(link)
    with appearing(link, overwrite=True) as work:
        (work / "new").write_text("")
    assert link.is_symlink() and link.readlink() == Path("engine-1")
    assert [path.name for path in real.iterdir()] == ["new"]


def test_a_file_whose_folder_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_file_target(tmp_path / "new" / "stats.npz")
    with pytest.raises(KvlatheError, match="no folder"):
        check_file_target(tmp_path / "file" / "stats.npz")
    with pytest.raises(KvlatheError, match="exists"):
        check_file_target(tmp_path / "file")


def test_a_failed_overwrite_leaves_the_old_engine(tmp_path: Path) -> None:
    target = an_engine(tmp_path / "engine")
    with pytest.raises(ZeroDivisionError), appearing(target, overwrite=True):
        _ = 1 / 0
    assert [path.name for path in target.iterdir()] == ["manifest.json"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    with pytest.raises(KvlatheError, match="exists"), appearing(target):
        target.mkdir()
        (target / "theirs").write_text("")
    assert [path.name for path in target.iterdir()] == ["theirs"]


def test_a_full_disk_is_one_clear_sentence(tmp_path: Path) -> None:
    """The real system call fails here: a file size limit stands in for the full
    disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with (
            pytest.raises(KvlatheError, match=r"disk is full .*Make room"),
            appearing(tmp_path / "engine") as work,
        ):
            (work / "weights").write_bytes(bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_librarys_own_words_for_a_full_disk_are_understood(
    tmp_path: Path, wrapped: bool
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(KvlatheError, match="disk is full"),
        appearing(tmp_path / "engine"),
    ):
        raise RuntimeError(f"I/O error: {full}") if wrapped else full


def test_a_parent_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KvlatheError, match="cannot be written"):
        check_target(tmp_path / "file" / "engine")
