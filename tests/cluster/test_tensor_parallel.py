"""Two processes with half a model each decode as one with all of it."""

import multiprocessing
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import psutil
import pytest
import torch

from cluster.placement import check_tensor_parallel
from cluster.tensor_parallel import MeetingPoint, TensorParallelGroup, open_meeting_point
from tests.tiny_models import SUPPORTED, save_model
from tests.workers.decoding import GREEDY, SAMPLED, generate, make_prompt
from workers.errors import ConfigError, UnsupportedModelError, WorkerLostError
from workers.model import load_config, load_model
from workers.paged_model import CacheOptions, PagedModel, Ranks
from workers.target import Target

CACHE = CacheOptions(block_size=4, max_num_seqs=2)
TIMEOUT_S = 400.0
EXITING_EARLY = ("llama", "gemma2", "mixtral")
"""Families that decode with their own drafts too."""

Texts = dict[str, list[list[int]]]


def early_exit_layer_of(name: str) -> int | None:
    return 2 if Path(name).name in EXITING_EARLY else None


def decode(name: str, tp_size: int = 1, ranks: Ranks | None = None) -> list[list[int]]:
    model = load_model(name, dtype="float32", tp_size=tp_size)
    early_exit_layer = early_exit_layer_of(name)
    target = Target(model, CACHE, ranks=ranks, early_exit_layer=early_exit_layer)
    for _ in range(3):  # the other ranks run along with timed steps
        target.step_table.time_one_step()
    prompt = make_prompt(1, 20)
    texts = [
        generate(target, prompt, 20, sampling=sampling, next_k=next_k)
        for sampling in (GREEDY, SAMPLED)
        for next_k in ((0, 3) if early_exit_layer else (0,))
    ]
    target.release(["s"])
    return texts


def run_rank(rank: int, point: MeetingPoint, names: list[str], texts: "Queue[Texts]") -> None:
    torch.set_num_threads(1)
    group = TensorParallelGroup(point, rank=rank, device_type="cpu")
    results: Texts = {}
    for name in names:
        if rank == 0:
            results[name] = decode(name, tp_size=2, ranks=group)
            group.dismiss()
        else:
            model = load_model(name, dtype="float32", tp_size=2)
            PagedModel(model, CACHE, group, early_exit_layer=early_exit_layer_of(name)).follow()
    if rank == 0:
        texts.put(results)
    group.close()


def can_be_shared(name: str) -> bool:
    try:
        check_tensor_parallel(name, load_config(name), 2)
    except (ConfigError, UnsupportedModelError):
        return False
    return True


def test_two_ranks_write_what_one_does(tmp_path: Path) -> None:
    """Every family that there is a plan for."""
    families = (*SUPPORTED, "qwen3_next", "llama4", "mistral3", "qwen3_vl")
    saved = {family: save_model(tmp_path / family, family) for family in families}
    names = [name for name in saved.values() if can_be_shared(name)]
    assert len(names) >= 16
    assert {saved["gpt_oss"], saved["qwen3_vl"]} <= {*names}  # by plans of ours
    spawn = multiprocessing.get_context("spawn")
    point, store = open_meeting_point("127.0.0.1", 2)
    texts: Queue[Texts] = spawn.Queue()
    processes = [
        spawn.Process(target=run_rank, args=(rank, point, names, texts), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    shared = texts.get(timeout=TIMEOUT_S)
    for process in processes:
        process.join(timeout=TIMEOUT_S)
    del store
    assert [process.exitcode for process in processes] == [0, 0]
    assert shared == {name: decode(name) for name in names}


def test_the_meeting_point_listens_on_its_own_address_alone() -> None:
    point, store = open_meeting_point("127.0.0.1", 2)
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == point.port
    ]
    del store
    assert listening == ["127.0.0.1"]


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.tensor_parallel.MEETING_TIMEOUT", timedelta(seconds=0.2))
    point, store = open_meeting_point("127.0.0.1", 3)
    with pytest.raises(WorkerLostError, match=r"rank 1, rank 2 of 3 did not come within 0.2 s"):
        TensorParallelGroup(point, rank=0, device_type="cpu", store=store)
