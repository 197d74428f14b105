"""Whether models fit each other, the options and the machine, by configurations and tokenizers."""

import math
from collections.abc import Sequence

import torch
from pydantic import ValidationError
from transformers import AutoTokenizer, PreTrainedConfig

from cluster import bundled
from cluster.found_model import FoundModel, Machine
from cluster.options import AppArgs
from cluster.placement import check_tensor_parallel
from cluster.plan.config import NodeKind, PlanConfig
from cluster.plan.fleet import Role
from cluster.plan.planning import Plan, make_plan
from cluster.topology import GIB
from workers.errors import (
    ConfigError,
    ModelNotFoundError,
    TandemError,
    UnsupportedModelError,
    VocabularyMismatchError,
    first_line,
)
from workers.first_layers import check_first_layers
from workers.model import load_config, max_position_of
from workers.vocabulary import compare_vocabularies


def check_fit(args: AppArgs, machine: Machine | None) -> Sequence[FoundModel]:
    """Check the models, whose files are there; `cluster.model_check.check_models` says how."""
    config = _read_config(args.target)
    check_tensor_parallel(args.target, config, args.tensor_parallel_size)
    _check_length(args, max_position_of(args.target, config))
    if args.early_exit_layer is not None:
        check_first_layers(args.target, config, args.early_exit_layer)
    _check_tokenizer(args.target)
    vocabulary = ""
    if args.draft_model is not None:
        _read_config(args.draft_model)
        vocabulary = _compare_vocabularies(args, args.draft_model)
    if machine is None:
        return ()
    node = _node(machine)
    _check_memory(args, node)
    if args.device.startswith("cuda") and not node.num_gpus:
        raise ConfigError(
            f"device is {args.device!r}, but torch sees no GPU on this machine; use device=cpu"
        )
    try:
        plan = make_plan(_plan_config(args, node))
    except UnsupportedModelError:
        if args.tensor_parallel_size == 1:
            raise
        return ()  # the shares of some models cannot be foreseen, but loaded
    if plan.problems:
        raise ConfigError(f"this does not fit: {'; '.join(plan.problems)}")
    _check_cache(args, plan)
    return tuple(
        _found(plan, role, vocabulary=vocabulary if role.name == "draft" else "")
        for role in plan.fleet.roles
    )


def _read_config(name: str) -> PreTrainedConfig:
    try:
        return load_config(bundled.resolve(name))
    except TandemError:
        raise
    except Exception as error:  # of whatever a config.json can hold
        raise UnsupportedModelError(
            f"model {name!r} has no usable config.json: {type(error).__name__}: {first_line(error)}"
        ) from error


def _check_length(args: AppArgs, max_position: int) -> None:
    if args.max_model_len is not None and args.max_model_len > max_position:
        raise ConfigError(
            f"max_model_len is {args.max_model_len}, but {args.target!r} has positions for "
            f"{max_position} tokens only; use at most that"
        )


def _check_memory(args: AppArgs, node: NodeKind) -> None:
    """A cache never takes more than its sequences need, but who asks for more is mistaken."""
    on_gpu = bool(node.num_gpus) and args.device != "cpu"
    memory_gib = node.gpu_memory_gib if on_gpu else node.memory_gib
    if args.kv_cache_gib is not None and args.kv_cache_gib > (memory_gib or 0):
        raise ConfigError(
            f"kv_cache_gib is {args.kv_cache_gib:g}, but {'a GPU of ' if on_gpu else ''}this "
            f"machine has {memory_gib:.1f} GiB of memory; use less, or leave it out"
        )


def _check_cache(args: AppArgs, plan: Plan) -> None:
    """A cache whose size is asked for has to hold a sequence; others may shorten them."""
    role, cache = plan.fleet.target, plan.layout.caches["target 0"]
    needed = role.needs.least_bytes / GIB
    if args.kv_cache_gib is not None and cache.num_tokens < role.max_model_len:
        raise ConfigError(
            f"kv_cache_gib is {args.kv_cache_gib:g}, which holds {cache.num_tokens} tokens of "
            f"{args.target!r}, less than a sequence of {role.max_model_len}; use at least "
            f"kv_cache_gib={_rounded_up(needed)}, or max_model_len={cache.num_tokens}"
        )


def _rounded_up(gib: float) -> str:
    """A size rounded up to two digits, as it is written in an option."""
    unit = 10.0 ** (math.floor(math.log10(gib)) - 1)
    return f"{math.ceil(gib / unit) * unit:.6g}"


def _check_tokenizer(name: str) -> None:
    try:
        AutoTokenizer.from_pretrained(bundled.resolve(name))
    except Exception as error:  # of whatever its files can hold
        raise ModelNotFoundError(
            f"target {name!r} has no tokenizer that can be loaded: {first_line(error)}; put its "
            "tokenizer files beside the weights"
        ) from error


def _compare_vocabularies(args: AppArgs, draft: str) -> str:
    """What is done with the draft's tokens; nothing to say if they are the target's."""
    target = args.target
    try:
        return compare_vocabularies(
            bundled.resolve(target), bundled.resolve(draft), args.heterogeneous_vocab
        ).description
    except VocabularyMismatchError as error:  # of bundled models it knows the folders
        message = str(error).replace(bundled.resolve(target), target)
        raise VocabularyMismatchError(message.replace(bundled.resolve(draft), draft)) from None


def _node(machine: Machine) -> NodeKind:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu_bytes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(num_gpus)]
    return NodeKind(
        name="this machine",
        num_cpus=machine.num_cpus,
        memory_gib=machine.memory_bytes / GIB,
        num_gpus=num_gpus,
        gpu_memory_gib=min(gpu_bytes) / GIB if gpu_bytes else None,
    )


def _plan_config(args: AppArgs, node: NodeKind) -> PlanConfig:
    try:
        return PlanConfig(args=args, nodes=(node,))
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _found(plan: Plan, role: Role, *, vocabulary: str) -> FoundModel:
    cache = plan.layout.caches[f"{role.name} 0"]
    return FoundModel(
        name=role.size.name,
        dtype=role.size.dtype,
        weight_bytes=role.size.weight_bytes,
        cache_bytes=cache.num_bytes,
        num_cache_tokens=cache.num_tokens,
        max_model_len=min(role.max_model_len, cache.num_tokens),
        vocabulary=vocabulary,
    )
