"""Two processes with half a model each decode as one with all of it."""

import asyncio
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from cluster.options import AppArgs
from cluster.placement import check_tensor_parallel
from cluster.tensor_parallel import MeetingPoint, TensorParallelGroup, open_meeting_point
from tests.deployments import loops
from tests.deployments.option_pairs import (
    PAIRS,
    REFUSED,
    TWO_RANKS,
    Pair,
    PlainTexts,
    load_target,
    name_of,
    options_of,
    save_models,
    write,
)
from tests.tiny_configs import SERVED, WRAPPED
from tests.tiny_models import make_config, save_model
from tests.workers.decoding import GREEDY, SAMPLED, generate, make_prompt
from workers.errors import ConfigError, UnsupportedModelError, WorkerLostError
from workers.model import load_model
from workers.paged_model import CacheOptions, PagedModel, Ranks
from workers.step_plan import StepPlan
from workers.target import Target
from workers.tensor_plans import add_plan, has_whole_experts

CACHE = CacheOptions(block_size=4, max_num_seqs=2)
TIMEOUT_S = 400.0
PROMPT, NUM_TOKENS = make_prompt(1, 20), 8
WAYS = ((SAMPLED, 0), (GREEDY, 0), (SAMPLED, 3))
"""How texts are sampled, and by how many drafts of the target's own."""
EXITING_EARLY = ("llama", "gemma2", "mixtral", "gpt2")
"""Families that decode with their own drafts too."""
ALONE = {"bamba", "falcon_h1", "gpt_bigcode", "lfm2", "mpt", "opt"}
"""Families that there is no plan for."""

Texts = dict[str, list[list[int]]]
Sources = dict[str, set[str]]
"""By model, the names of the drafters whose drafts were verified."""


def early_exit_layer_of(name: str) -> int | None:
    return 2 if Path(name).name in EXITING_EARLY else None


def decode(name: str, truth: list[list[int]] | None = None, ranks: Ranks | None = None) -> Any:
    """Texts of a model; with drafts, of which the last is wrong, where the truth is known."""
    model = load_model(name, dtype="float32", tp_size=2 if ranks else 1)
    early_exit_layer = early_exit_layer_of(name)
    target = Target(model, CACHE, ranks=ranks, early_exit_layer=early_exit_layer)
    texts = []
    for index, (sampling, next_k) in enumerate(WAYS if early_exit_layer else WAYS[:1]):

        def drafts(_: str, tokens: Sequence[int], index: int = index) -> list[int]:
            done = len(tokens) - len(PROMPT)
            return [*truth[index][done : done + 2 + done % 4], 5] if truth else []

        own = {"next_k": next_k} if next_k else {"drafts": drafts}
        texts.append(generate(target, PROMPT, NUM_TOKENS, sampling=sampling, **own))
    target.step_table.time_one_step()  # which the other ranks run along with
    return texts


class NextModelError(Exception):
    """The first rank goes on with another model."""


class GroupOfModels(TensorParallelGroup):
    """Ranks that share one model after the other: an empty plan is the end of one."""

    def follow(self, run: Callable[[StepPlan], object]) -> NoReturn:
        def run_if_any(plan: StepPlan) -> None:
            if not plan.tokens:
                raise NextModelError
            run(plan)

        super().follow(run_if_any)


def follow(paged: PagedModel) -> None:
    """Run what the first rank announces of this model."""
    with pytest.raises(NextModelError):
        paged.follow()


def lead(
    group: GroupOfModels, all_args: Mapping[str, AppArgs], truths: Texts
) -> tuple[Texts, Sources]:
    """The first rank: a target with each of these options, then each model of `truths`."""
    texts: Texts = {}
    sources: Sources = {}
    for key, args in all_args.items():
        written = asyncio.run(write(args, group))
        texts[key], sources[key] = written.token_ids, written.sources
        group.announce(StepPlan())
    for name, truth in truths.items():
        texts[name] = decode(name, truth, group)
        group.announce(StepPlan())
    return texts, sources


def run_first_rank(
    point: MeetingPoint, all_args: Mapping[str, AppArgs], truths: Texts, results: Connection
) -> None:
    group = GroupOfModels(point, rank=0, device_type="cpu")
    results.send((truths, *lead(group, all_args, truths)))
    group.close()


def run_both_ranks(
    point: MeetingPoint, all_args: Mapping[str, AppArgs], names: Sequence[str], results: Connection
) -> None:
    """This process is the second rank: the other half of what `lead` has, until that one leaves.

    It has imported everything and decoded alone, so the first rank is a fork of it.
    """
    torch.set_num_threads(1)
    truths: Texts = {name: decode(name) for name in names}
    # threads of each mesh's groups poll as long as a process lives, so models have one mesh
    dist.init_device_mesh = cache(dist.init_device_mesh)
    first = multiprocessing.get_context("fork").Process(
        target=run_first_rank, args=(point, all_args, truths, results)
    )
    first.start()
    results.close()
    group = GroupOfModels(point, rank=1, device_type="cpu")
    for args in all_args.values():
        half, layer = load_target(args), args.early_exit_layer
        follow(PagedModel(half, loops.CACHE, group, early_exit_layer=layer))
    for name in truths:
        model = load_model(name, dtype="float32", tp_size=2)
        follow(PagedModel(model, CACHE, group, early_exit_layer=early_exit_layer_of(name)))
    with pytest.raises(RuntimeError):
        group.follow(lambda _: None)
    group.close()
    first.join()
    assert first.exitcode == 0


def config_of(family: str) -> PreTrainedConfig:
    """As a worker reads it, with a plan of ours where transformers has none."""
    config = make_config(family)
    add_plan(config)
    return config


def can_be_shared(family: str) -> bool:
    try:
        check_tensor_parallel(family, config_of(family), 2)
    except (ConfigError, UnsupportedModelError):
        return False
    return True


def ways_to_share(family: str) -> set[tuple[str, str]]:
    """How the plan of a family cuts each kind of layer, and that a wrapper is around it."""
    config = config_of(family)
    text_config: Any = config.get_text_config()
    plan = dict(text_config.base_model_tp_plan or {})
    if has_whole_experts(config):
        plan |= text_config.base_model_ep_plan
    if family in WRAPPED:
        plan["model"] = "wrapped"
    return {(".".join(layer.split(".")[-2:]), style) for layer, style in plan.items()}


def with_ways_of_their_own(families: Sequence[str]) -> list[str]:
    """The families that are shared in some way in which none before them is."""
    chosen, known = [], set[tuple[str, str]]()
    for family in families:
        ways = ways_to_share(family)
        if ways - known:
            chosen.append(family)
        known |= ways
    return chosen


def texts_of_one_rank(pairs: Sequence[Pair], folder: Path) -> Texts:
    """What one rank writes with each two options, without drafts."""
    texts = PlainTexts()
    return {
        name_of(pair): asyncio.run(texts.of(AppArgs(**options_of(pair - {TWO_RANKS}, folder))))
        for pair in pairs
    }


def test_two_ranks_write_what_one_does(tmp_path: Path, has_all_combinations: bool) -> None:
    """Every way to share the layers of a family that is served, or every family that can be
    shared, and every option."""
    families = [family for family in SERVED if can_be_shared(family)]
    assert {*SERVED} - {*families} == ALONE
    if not has_all_combinations:
        families = with_ways_of_their_own(families)
    names = [save_model(tmp_path / family, family) for family in families]
    save_models(tmp_path)
    pairs = [pair for pair in PAIRS if TWO_RANKS in pair and pair not in REFUSED]
    all_args = {name_of(pair): AppArgs(**options_of(pair, tmp_path)) for pair in pairs}
    point, store = open_meeting_point("127.0.0.1", 2)
    spawn = multiprocessing.get_context("spawn")
    receiving, sending = spawn.Pipe(duplex=False)
    ranks = spawn.Process(target=run_both_ranks, args=(point, all_args, names, sending))
    ranks.start()
    sending.close()
    try:
        assert receiving.poll(TIMEOUT_S)
        alone, shared, sources = receiving.recv()
        ranks.join(timeout=TIMEOUT_S)
    finally:
        ranks.kill()
    del store
    assert ranks.exitcode == 0
    assert {*alone} == {*names}
    assert shared == alone | texts_of_one_rank(pairs, tmp_path)
    assert sources == {key: {*args.drafters} for key, args in all_args.items()}


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
