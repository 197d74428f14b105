"""The threads that share the work of a step on a CPU."""

import ctypes
import functools
from collections.abc import Callable

import torch

# OpenMP's omp_pause_soft: what was set, such as the number of threads, stays.
SOFT_PAUSE = 1


def use(num_threads: int) -> None:
    """Have the calling thread's steps done by so many threads; others are not told."""
    torch.set_num_threads(num_threads)


def park() -> None:
    """End the threads that helped the calling one with its steps; the next step makes new ones.

    They would spin for about 10 ms after a step, waiting for the next, and keep from their cores
    the drafters and routers that the next step waits for. This costs a quarter of a millisecond.
    """
    _find_pause()(SOFT_PAUSE)


@functools.cache
def _find_pause() -> Callable[[int], object]:
    try:
        pause: Callable[[int], object] = ctypes.CDLL(None).omp_pause_resource_all
    except (OSError, AttributeError):  # torch without OpenMP, or one older than 5.0
        return lambda _: None
    return pause
