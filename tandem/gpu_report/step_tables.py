"""Step 2: how long a step takes, what of it is the device's, and how fast it reads the weights."""

import time
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from tandem.gpu_report.findings import Notebook
from tandem.gpu_report.subjects import (
    Subjects,
    choose_subjects,
    find_kernels,
    free_memory,
    grown_target,
    make_target,
    time_sizes,
)
from workers.cache_size import GIB
from workers.model import Model
from workers.step_times import Size
from workers.target import Target

PROFILED_SIZES: tuple[Size, ...] = ((1, 1), (1, 8), (8, 64))
NUM_PROFILED = 5
COPIED_BYTES = {"cuda": 2 * GIB, "cpu": 64 * 1024**2}
NUM_COPIES = 5
NUM_LAUNCHES = 1000
NEEDED_S = 20.0
"""Seconds that another target is not begun with less than."""


def run(notebook: Notebook, *, is_small: bool) -> None:
    """Time steps of each target, by its own forward and by graphs."""
    subjects = choose_subjects(is_small=is_small)
    bytes_per_s = copy_speed(subjects.device)
    notebook.note(
        f"A copy reads and writes {bytes_per_s / 1e9:.0f} GB/s; launching a kernel takes the host "
        f"{launch_time(subjects.device) * 1e6:.1f} microseconds."
    )
    for name in subjects.targets:
        needs_s = 0.0 if name == next(iter(subjects.targets)) else NEEDED_S
        if notebook.has_time(f"step times of the {name} target", needs_s=needs_s):
            _time_target(notebook, subjects, name, bytes_per_s)
            free_memory(subjects)  # before the next, which is larger


def _time_target(notebook: Notebook, subjects: Subjects, name: str, bytes_per_s: float) -> None:
    model = grown_target(subjects, name)
    target = make_target(model, subjects)
    kernels = [f"{size} ({name})" for size, name in find_kernels(model).items()]
    notebook.note(
        f"The {name} target has {model.num_weight_bytes / 1e9:.2f} GB of weights. Blocks of "
        f"{', '.join(kernels) or 'no'} tokens have a fused attention kernel; this run's have "
        f"{target.info.block_size}."
    )
    title = f"Steps of the {name} target"
    if notebook.has_time(f"{title}, own forward"):
        _time_sizes(notebook, model, target, f"{title}, own forward", subjects.sizes, bytes_per_s)
    if subjects.device != "cuda":
        notebook.skip(f"graphs of the {name} target: a CPU has none")
    elif notebook.has_time(f"{title}, graphs"):
        target.start_compiling().join()
        if target.is_compiled:
            _time_sizes(notebook, model, target, f"{title}, graphs", subjects.sizes, bytes_per_s)
        else:
            notebook.skip(f"graphs of the {name} target: they cannot be had here")


def _time_sizes(
    notebook: Notebook,
    model: Model,
    target: Target,
    title: str,
    sizes: Sequence[Size],
    bytes_per_s: float,
) -> None:
    budget_s = min(10.0, notebook.left_s / 3)
    weight_bytes = model.num_weight_bytes
    for step in time_sizes(notebook, target, title, sizes, budget_s=budget_s):
        notebook.add(
            title,
            {
                "sequences": step.num_sequences,
                "tokens": step.num_tokens,
                "step ms": step.seconds * 1e3,
                "weights GB/s": weight_bytes / step.seconds / 1e9,
                "share of the copy speed": weight_bytes / step.seconds / bytes_per_s,
            },
        )
    for size in PROFILED_SIZES:
        if notebook.has_time(f"{title}: the profile of {size}"):
            _profile(notebook, model, target, f"{title}: on the device and beside it", size)


def _profile(notebook: Notebook, model: Model, target: Target, title: str, size: Size) -> None:
    """How much of a step the device computes; the rest is the host's, or waiting."""
    is_cuda = model.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    step_s = min(target.time_step(size) for _ in range(NUM_PROFILED))
    with profile(activities=activities) as profiler:
        for _ in range(NUM_PROFILED):
            target.time_step(size)
    # an operator's row counts its kernels too, which have rows of their own
    events = [e for e in profiler.key_averages() if (e.device_type.name == "CUDA") == is_cuda]
    total_us = sum(e.self_device_time_total if is_cuda else e.self_cpu_time_total for e in events)
    busy_s = total_us / NUM_PROFILED / 1e6
    notebook.add(
        title,
        {
            "sequences": size[0],
            "tokens": size[1],
            "step ms": step_s * 1e3,
            "kernels ms" if is_cuda else "operators ms, profiled": busy_s * 1e3,
            "beside them ms": max(0.0, step_s - busy_s) * 1e3,
            "kernels" if is_cuda else "operators": sum(e.count for e in events) / NUM_PROFILED,
        },
    )


def copy_speed(device: str) -> float:
    """Bytes per second that the memory reads and writes together, in a plain copy."""
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(_timed(lambda: target.copy_(source), device) for _ in range(NUM_COPIES))
    return 2 * source.numel() / seconds


def launch_time(device: str) -> float:
    """Seconds between small kernels that are launched one after the other."""
    tensor = torch.zeros(1, device=device)

    def launch_all() -> None:
        for _ in range(NUM_LAUNCHES):
            tensor.add_(1.0)

    return min(_timed(launch_all, device) for _ in range(NUM_COPIES)) / NUM_LAUNCHES


def _timed(run: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
