"""A native library that is not what was built is refused in words before it is loaded,
and is never written over in place."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlathe.base import library_digest
from kvlathe.base.errors import KvlatheError
from kvlathe.base.library_digest import check_digest, digest_file, put, remove_damaged

LIBRARY = "libkvlathe.so"


def python_library() -> Path:
    """Some shared library of this machine."""
    import _ctypes

    return Path(_ctypes.__file__)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a library and its digest."""
    built, folder = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("package")
    put(Path(shutil.copy2(python_library(), built / LIBRARY)), folder)
    return folder


def test_a_digest_is_as_sha256sum_writes_it(package: Path) -> None:
    check_digest(package / LIBRARY)
    told = shutil.which("sha256sum")
    if told is None:
        pytest.skip("no sha256sum")
    subprocess.run(
        [told, "-c", digest_file(package / LIBRARY)], cwd=package, check=True
    )


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(place=st.floats(0, 1, exclude_max=True), cut=st.booleans())
def test_every_cut_and_every_changed_byte_is_refused(
    place: float, cut: bool, package: Path, tmp_path: Path
) -> None:
    library = Path(shutil.copy2(package / LIBRARY, tmp_path / LIBRARY))
    data = bytearray(library.read_bytes())
    at = int(place * len(data))
    data[at] ^= 0x40
    library.write_bytes(data[:at] if cut else data)
    shutil.copy2(digest_file(package / LIBRARY), tmp_path)
    with pytest.raises(KvlatheError, match="is damaged"):
        check_digest(library)
    if cut and at >= 16:  # without a digest, too
        digest_file(library).unlink()
        with pytest.raises(KvlatheError, match="shorter than its header says"):
            check_digest(library)


def test_a_library_is_replaced_under_whoever_has_mapped_it(
    package: Path, tmp_path: Path
) -> None:
    put(package / LIBRARY, tmp_path)
    library = tmp_path / LIBRARY
    with library.open("rb") as before:
        other = tmp_path / "other"
        other.mkdir()
        (other / LIBRARY).write_bytes(b"another")
        put(other / LIBRARY, tmp_path)
        assert before.read() == (package / LIBRARY).read_bytes()
    assert library.read_bytes() == b"another"
    check_digest(library)
    assert {x.name for x in tmp_path.iterdir()} == {
        *(LIBRARY, LIBRARY + library_digest.SUFFIX),
        "other",
    }


def test_a_build_begins_by_taking_damaged_libraries_away(
    package: Path, tmp_path: Path
) -> None:
    put(package / LIBRARY, tmp_path)
    remove_damaged(tmp_path)
    library = tmp_path / LIBRARY
    assert library.is_file()
    library.write_bytes(library.read_bytes()[:-100])
    remove_damaged(tmp_path)
    assert not library.exists()


def test_loading_a_cut_library_ends_in_words(package: Path, tmp_path: Path) -> None:
    """In a process of its own: the loader would end this one."""
    library = tmp_path / LIBRARY
    for name in (LIBRARY, LIBRARY + library_digest.SUFFIX):
        shutil.copy2(package / name, tmp_path / name)
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    code = (
        "import sys; from pathlib import Path\n"
        "from kvlathe.base.errors import KvlatheError\n"
        "from kvlathe.runtime.native.library import Native\n"
        "try: Native.load(Path(sys.argv[1]))\n"
        "except KvlatheError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, library], capture_output=True, text=True
    )
    assert done.returncode == 0 and "is damaged" in done.stdout, done
