"""The threads that help with steps end when there is nothing to do, and come back."""

import threading
from contextlib import suppress
from pathlib import Path

import torch

from workers.cpu import step_threads

NAME = "steps"
"""The name of the thread that does steps, which those that it starts have too."""


def num_helpers() -> int:
    """How many threads the one that does steps has started."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return names.count(NAME) - 1


def test_helpers_end_and_come_back() -> None:
    """The test runs on a thread of its own, whose helpers are no other test's."""
    counts: list[int] = []
    products: list[torch.Tensor] = []

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(NAME)
        torch.set_num_threads(2)
        matrix = torch.arange(512.0 * 512).reshape(512, 512) / 1e5
        for _ in range(2):
            products.append(matrix @ matrix)
            counts.append(num_helpers())
            step_threads.park()
            counts.append(num_helpers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts == [1, 0, 1, 0]
    torch.testing.assert_close(products[0], products[1], rtol=0, atol=0)
