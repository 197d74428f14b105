"""Numbers as a reader wants them."""

from workers.cache_size import GIB

UNITS = (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024))


def size(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of at least 1, like 70.0 GiB."""
    for unit, unit_bytes in UNITS:
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def count(number: float, word: str) -> str:
    """A number and what it counts, like 1 node, 2 nodes."""
    return f"{number:,g} {word}{'' if number == 1 else 's'}"


def part_of_gpu(part: float) -> str:
    """A whole GPU, or 0.9 of a GPU."""
    return "a GPU" if part == 1 else f"{part:g} of a GPU"


def listed(parts: list[str], *, last: str = "and") -> str:
    """Words as one phrase, like a, b and c."""
    return f" {last} ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
