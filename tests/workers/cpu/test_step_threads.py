"""The threads that help with steps end when there is nothing to do, and come back."""

import threading

import psutil
import torch

from workers.cpu import step_threads


def test_helpers_end_and_come_back() -> None:
    """The test runs on a thread of its own, whose helpers are no other test's."""
    process = psutil.Process()
    num_threads: list[int] = []
    products: list[torch.Tensor] = []

    def work() -> None:
        torch.set_num_threads(2)
        matrix = torch.arange(512.0 * 512).reshape(512, 512) / 1e5
        for _ in range(2):
            products.append(matrix @ matrix)
            num_threads.append(process.num_threads())
            step_threads.park()
            num_threads.append(process.num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with_helper = num_threads[0]
    assert num_threads == [with_helper, with_helper - 1, with_helper, with_helper - 1]
    torch.testing.assert_close(products[0], products[1], rtol=0, atol=0)
