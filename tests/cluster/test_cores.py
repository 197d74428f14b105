"""Threads for the cores that a container may use, not for those of its machine."""

from pathlib import Path

import psutil
import pytest

from cluster.cores import usable_cores


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: list(range(64)), raising=False)


def groups(folder: Path, own: str, files: dict[str, str]) -> int:
    """The cores with such files of control groups."""
    (folder / "own").write_text(own)
    for name, content in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return usable_cores(cgroups=folder / "cgroup", own_groups=folder / "own")


@pytest.mark.parametrize(
    ("own", "files", "num_cores"),
    [
        ("0::/", {}, 64),
        ("0::/", {"cpu.max": "max 100000\n"}, 64),
        ("0::/", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/pod/box", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "200000 100000"}, 2),
        ("0::/of/the/host", {"cpu.max": "300000 100000"}, 3),
        ("0::/", {"cpu.max": "nonsense"}, 64),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/pod\n1:memory:/other\n0::/",
            {"cpu,cpuacct/pod/cpu.cfs_quota_us": "150000\n",
             "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        (
            "1:cpu:/\n0::/",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            64,
        ),
    ],
)  # fmt: skip
def test_a_quota_limits_the_cores(
    own: str, files: dict[str, str], num_cores: int, tmp_path: Path
) -> None:
    assert groups(tmp_path, own, files) == num_cores


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(cgroups=tmp_path / "no", own_groups=tmp_path / "none") == 64


def test_without_affinity_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(psutil.Process, "cpu_affinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 10)
    assert usable_cores(cgroups=tmp_path / "no", own_groups=tmp_path / "none") == 10


def test_this_machine_has_some() -> None:
    assert usable_cores() >= 1
