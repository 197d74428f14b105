"""What a rank of a target group loads, and how many threads it has."""

import pytest
import torch

from cluster.options import AppArgs
from deployments.replicas import target_model
from deployments.replicas.target_model import load_target, num_target_threads
from workers.drafters.model import SMALL_MODEL_BYTES


@pytest.mark.parametrize(
    ("options", "weight_bytes", "num_threads"),
    [
        ({}, SMALL_MODEL_BYTES, 8),
        ({"tensor_parallel_size": 3}, SMALL_MODEL_BYTES, 2),
        ({"tensor_parallel_size": 16}, SMALL_MODEL_BYTES, 1),
        ({}, SMALL_MODEL_BYTES - 1, 1),
        ({"target_num_threads": 4}, SMALL_MODEL_BYTES - 1, 4),
    ],
)
def test_small_weights_have_one_thread_and_others_share_the_cores(
    options: dict[str, int],
    weight_bytes: int,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_model, "usable_cores", lambda: 8)
    assert num_target_threads(AppArgs(**options), weight_bytes=weight_bytes) == num_threads


def test_the_bundled_target_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    load_target(AppArgs(device="cpu"))
    assert used == [1]
