"""What is compiled once per machine: it is kept while somebody uses it."""

import os
import time
from pathlib import Path

import pytest
from filelock import FileLock

from workers.cpu import machine_cache

DAY_S = 24 * 3600.0


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(
        machine_cache.cpp_extension, "get_default_build_root", lambda: str(tmp_path)
    )
    return tmp_path / "tandem"


def build_file(path: Path) -> None:
    path.write_text("built")


def build_folder(path: Path) -> None:
    path.mkdir()
    (path / "part").write_text("built")


def fail(_: Path) -> None:
    raise AssertionError("it is there")


def age(path: Path, num_days: float) -> None:
    then = time.time() - num_days * DAY_S
    os.utime(path, (then, then))


def lock_of(path: Path) -> FileLock:
    return FileLock(path.with_name(f"{path.name}.lock"))


def test_what_is_built_is_kept() -> None:
    built = machine_cache.get_or_build("x", ["source"], build_folder)
    assert (built / "part").read_text() == "built"
    assert machine_cache.get_or_build("x", ["source"], fail) == built


def test_what_nobody_has_used_for_a_month_goes_when_anything_is_built(folder: Path) -> None:
    unused, unused_file, lately, again = (
        machine_cache.get_or_build("x", [source], build)
        for source, build in (
            ("a", build_folder),
            ("b", build_file),
            ("c", build_folder),
            ("d", build_folder),
        )
    )
    for path, num_days in ((unused, 31), (unused_file, 31), (lately, 29), (again, 31)):
        age(path, num_days)
    machine_cache.get_or_build("x", ["d"], fail)
    assert unused.exists()
    new = machine_cache.get_or_build("y", ["a"], build_file)
    assert {path for path in folder.iterdir() if path.suffix != ".lock"} == {lately, again, new}


def test_what_somebody_looks_for_stays() -> None:
    unused = machine_cache.get_or_build("x", ["a"], build_file)
    age(unused, 31)
    with lock_of(unused):
        machine_cache.get_or_build("x", ["b"], build_file)
        assert unused.exists()


def half_built(source: str) -> Path:
    """What a builder that was killed has left."""
    left = []

    def build_half(path: Path) -> None:
        build_folder(path)
        left.append(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine_cache.get_or_build("x", [source], build_half)
    return left[0]


def test_builds_that_were_killed_are_cleared_away() -> None:
    again, old, new = (half_built(source) for source in "abc")
    age(old, 31)
    machine_cache.get_or_build("x", ["a"], build_file)
    assert [path.exists() for path in (again, old, new)] == [False, False, True]
