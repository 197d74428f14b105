"""How many cores this process may use: of its machine, its affinity and its container."""

import math
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores(*, cgroups: Path = CGROUPS, own_groups: Path = OWN_GROUPS) -> int:
    """The cores that this process may use: at least one, and no more than its container's limit.

    Args:
        cgroups: where Linux shows control groups; elsewhere nothing is there.
        own_groups: the file that says to which of them this process belongs.
    """
    quotas = [quota for folder in _own_folders(cgroups, own_groups) if (quota := _quota(folder))]
    return max(1, min([_allowed_cores(), *map(math.ceil, quotas)]))


def _allowed_cores() -> int:
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return len(process.cpu_affinity() or ())
    return psutil.cpu_count() or 1


def _own_folders(cgroups: Path, own_groups: Path) -> list[Path]:
    """The groups of this process and those around them, of both versions of control groups.

    In a container the paths may be those of the host, which are not there; the root is its own.
    """
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        own = root / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return folders


def _quota(folder: Path) -> float | None:
    """The cores that the group may use, in the mean; None without a limit."""
    try:
        if (folder / "cpu.max").is_file():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return float(limit) / float(period) if float(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # not there, or "max"
        return None
