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
from workers.cache_size import GIB
from workers.checkpoint import read_config
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
from workers.model_source import ModelSource
from workers.quantizing import check_quantization
from workers.vocabulary import compare_vocabularies


def check_fit(args: AppArgs, machine: Machine | None) -> Sequence[FoundModel]:
    """Check the models, whose files are there; `cluster.model_check.check_models` says how."""
    config = _read_config(args.target_source)
    check_tensor_parallel(args.target, config, args.tensor_parallel_size)
    _check_length(args, max_position_of(args.target, config))
    if args.early_exit_layer is not None:
        check_first_layers(args.target, config, args.early_exit_layer)
    _check_tokenizer(args.target_source)
    vocabulary = ""
    if (draft := args.draft_source) is not None:
        _read_config(draft)
        vocabulary = _compare_vocabularies(args, draft)
    _check_quantization(args, machine)
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


def _read_config(model: ModelSource) -> PreTrainedConfig:
    try:
        return load_config(bundled.resolve(model))
    except TandemError:
        raise
    except Exception as error:  # of whatever a config.json can hold
        raise UnsupportedModelError(
            f"model {model!r} has no usable config.json: {type(error).__name__}: "
            f"{first_line(error)}"
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


def _check_tokenizer(model: ModelSource) -> None:
    try:
        AutoTokenizer.from_pretrained(bundled.resolve(model.name), **model.hub_options)
    except Exception as error:  # of whatever its files can hold
        raise ModelNotFoundError(
            f"target {model!r} has no tokenizer that can be loaded: {first_line(error)}; put its "
            "tokenizer files beside the weights"
        ) from error


def _compare_vocabularies(args: AppArgs, draft: ModelSource) -> str:
    """What is done with the draft's tokens; nothing to say if they are the target's."""
    target = args.target_source
    try:
        return compare_vocabularies(
            bundled.resolve(target), bundled.resolve(draft), args.heterogeneous_vocab
        ).description
    except VocabularyMismatchError as error:  # of bundled models it knows the folders
        message = str(error)
        for model in (target, draft):
            message = message.replace(bundled.resolve(model.name), model.name)
        raise VocabularyMismatchError(message) from None


def _check_quantization(args: AppArgs, machine: Machine | None) -> None:
    """Whether each can be quantized as asked, where it is going to be loaded on this machine."""
    if machine is None:
        return
    on_gpu = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    for option, model, how in (
        ("quantization", args.target_source, args.quantization),
        ("draft_quantization", args.draft_source, args.draft_quantization),
    ):
        if model is not None:
            config = read_config(bundled.resolve(model))
            check_quantization(model, config, how, device, option=option)


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
    return FoundModel(
        name=role.size.name,
        dtype=role.size.precision,
        weight_bytes=role.size.weight_bytes,
        cache_bytes=plan.layout.caches[f"{role.name} 0"].num_bytes,
        vocabulary=vocabulary,
    )
