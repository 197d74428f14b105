"""A model together with its paged cache: runs the new tokens of many sequences in one forward."""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

import psutil
import torch
from torch import Tensor

from workers.cache_size import GIB, CacheNeeds, CacheShares, share_cache
from workers.cpu import compiled_step
from workers.cuda import gpu_memory, graphed_step
from workers.cuda.graphed_step import CacheShape
from workers.errors import ConfigError
from workers.first_layers import first_layers
from workers.model import Model
from workers.state_slots import num_slots
from workers.step_inputs import LayerCache, StepInputs, step_inputs
from workers.step_plan import StepPlan
from workers.types import WorkerInfo

logger = logging.getLogger(__name__)

# Several workers and the operating system share main memory; a GPU, or a part, has one worker.
FREE_MEMORY_FRACTION = {"cpu": 0.3, "cuda": 0.9}

Forward = Callable[[StepInputs], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How much to cache. None lets the worker decide."""

    block_size: int = 16
    max_model_len: int | None = None
    """Longest sequence, prompt and completion; by default what the model's positions allow."""
    max_num_seqs: int = 64
    """Sequences that should fit at full length, if memory allows."""
    kv_cache_gib: float | None = None
    """The GiB of keys and values; by default a fraction of what is free beside the loaded model."""
    prefix_caching: bool = True
    """Whether sequences that begin alike share cache blocks; never with recurrent layers."""
    gpu_share: float = 1
    """The part of a GPU's memory for this process; other ones have the rest."""


class Ranks(Protocol):
    """A group of ranks that share a model's weights, as one of them sees it.

    They make every forward together, so the first one decides what is run: it announces each plan,
    and the others run what they hear, in that order.
    """

    def least(self, number: int) -> int:
        """The least of all ranks' numbers; every rank must ask."""
        ...

    def announce(self, plan: StepPlan) -> None:
        """Have the other ranks run a plan now; the first rank calls it."""
        ...

    def follow(self, run: Callable[[StepPlan], object]) -> NoReturn:
        """Run what the first rank announces, until it is gone; the others call it."""
        ...


class PagedModel:
    """A model's forward over the cache of its layers; in a group, this rank's shard of both."""

    def __init__(
        self,
        model: Model,
        options: CacheOptions,
        ranks: Ranks | None = None,
        *,
        early_exit_layer: int | None = None,
    ) -> None:
        """Allocate the cache, as large on all ranks; raises ConfigError if `options` cannot be met.

        Args:
            ranks: of the group that this process is in, if it is in one.
            early_exit_layer: how many of the first layers can be run alone, if any can.
        """
        self.max_model_len, shares = _size_cache(model, options)
        if model.device.type == "cuda":
            gpu_memory.keep_to_share(model.device, options.gpu_share)
        self.num_blocks, self.num_states = shares.num_blocks, shares.num_states
        if ranks is not None:
            self.max_model_len = ranks.least(self.max_model_len)
            self.num_blocks = ranks.least(self.num_blocks)
            self.num_states = ranks.least(self.num_states)
        self.model = model = model.for_texts_of(self.max_model_len)
        early = None if early_exit_layer is None else first_layers(model, early_exit_layer)
        _check_blocks(model, options.block_size)
        self.block_size = options.block_size
        self._ranks = ranks
        # one block more than sequences are given: see `scratch_plan`
        self._layers = model.make_cache(self.num_blocks + 1, self.block_size)
        for layer in self._layers:  # memory that was never written may hold NaN
            layer.keys[self.num_blocks * self.block_size :] = 0
            layer.values[self.num_blocks * self.block_size :] = 0
        self._states = model.make_states(num_slots(self.num_states))
        self._early = None if early is None else _Early(early, self._layers)
        self.forward: Forward = model.forward
        """The model's own, or a compiled or recorded one in its place."""
        self.is_compiled = False
        """Whether steps are run by a compiled forward, or by a recorded one, from now on."""
        self.num_tokens_run = 0
        """Tokens that steps have run since the start."""
        self._warnings: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences that an operator should read."""
        return self.model.text_warnings + self._warnings

    @property
    def info(self) -> WorkerInfo:
        """What a worker with this model says of itself, except for the times of its steps."""
        return WorkerInfo(
            model=self.model.name,
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.model.eos_token_ids,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            weight_bytes=self.model.num_weight_bytes,
            quantization=self.model.quantization,
        )

    @property
    def is_in_group(self) -> bool:
        """Whether other ranks run each step too."""
        return self._ranks is not None

    @property
    def has_early_exit(self) -> bool:
        """Whether plans may be run by the first layers alone."""
        return self._early is not None

    def run(self, plan: StepPlan, *, is_counted: bool = True) -> Tensor:
        """Run and cache the tokens of a plan, on all ranks; blocks for them must be reserved.

        Returns the wanted logits.  # [len(plan.logit_rows), vocab]
        """
        self.num_tokens_run += len(plan.tokens) if is_counted else 0
        if self._ranks is not None:
            self._ranks.announce(plan)
        return self._run_shard(plan)

    def follow(self) -> NoReturn:
        """Run what the first rank of the group decides, until it is gone."""
        assert self._ranks is not None, "only a group has a first rank"
        self._ranks.follow(self._run_shard)

    def _run_shard(self, plan: StepPlan) -> Tensor:
        layers, forward = self._layers, self.forward
        if plan.is_early:
            assert self._early is not None, "all ranks have an early exit, or none has"
            layers, forward = self._early.layers, self._early.forward
        inputs = step_inputs(
            plan,
            layers,
            vocab_size=self.model.vocab_size,
            block_size=self.block_size,
            device=self.model.device,
            states=self._states,
        )
        return forward(inputs)

    def scratch_plan(self, num_sequences: int, num_tokens: int, *, context_len: int) -> StepPlan:
        """A step whose time is that of a real one, and which leaves nothing behind.

        It runs `num_tokens` new tokens, spread evenly over sequences with `context_len` tokens
        before them, or as many as a sequence may have. All of them stand in the one block that no
        sequence is given, over and over: what is read there does not matter. Recurrent states begin
        anew and go where nobody reads them.
        """
        plan = StepPlan()
        for index in range(num_sequences):
            num_new = (num_tokens + index) // num_sequences
            cached_len = max(0, min(context_len, self.max_model_len - num_new))
            num_blocks = -(-(cached_len + num_new) // self.block_size)
            plan.add_chunk(
                (0,) * num_new,
                cached_len=cached_len,
                block_table=(self.num_blocks,) * num_blocks,
                num_logits=num_new,
            )
        return plan

    def start_compiling(self) -> threading.Thread:
        """Have the forward compiled, beside the steps that run meanwhile; they use it from then on.

        Compiled for as many threads as the calling one has. On CUDA it is recorded instead, which
        bears no other work on the device: that is done when this returns.
        """
        is_cuda = self.model.device.type == "cuda"
        obtain = partial(self._obtain, num_threads=torch.get_num_threads())

        def obtain_and_switch() -> None:
            step = obtain(self.model, self._layers)
            if step is not None:
                self.forward = step
                self.is_compiled = True
            elif not is_cuda:
                self._warnings = (
                    f"{self.model.name} has no compiled forward here, so its steps are slower; "
                    "the log says why",
                )
            if step is not None and self._early is not None:
                early_step = obtain(self._early.model, self._early.layers)
                self._early.forward = early_step or self._early.forward

        thread = threading.Thread(target=obtain_and_switch, name="compile", daemon=True)
        thread.start()
        if is_cuda:
            thread.join()
        return thread

    def _obtain(
        self, model: Model, layers: Sequence[LayerCache], *, num_threads: int
    ) -> Forward | None:
        """The forward of the model, or of its first layers, compiled or recorded."""
        if model.device.type != "cuda":
            return compiled_step.obtain(model, block_size=self.block_size, num_threads=num_threads)
        cache = CacheShape(
            layers=layers,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            spare_block=self.num_blocks,
        )
        return graphed_step.obtain(model, cache)


class _Early:
    """The first layers of a model, over their part of its cache."""

    def __init__(self, model: Model, layers: Sequence[LayerCache]) -> None:
        self.model = model
        numbers = {spec.layer for spec in model.layer_specs}
        self.layers = tuple(layer for layer in layers if layer.layer in numbers)
        self.forward: Forward = model.forward
        """The model's own, or a compiled or recorded one in its place."""


def _size_cache(model: Model, options: CacheOptions) -> tuple[int, CacheShares]:
    """The longest sequence to serve, and what to allocate.

    Raises ConfigError if `options` cannot be met.
    """
    max_model_len = options.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {model.name!r} has positions for "
            f"{model.max_position} tokens only; use at most that"
        )
    cache_bytes = _cache_bytes(model.device, options)
    needs = CacheNeeds(
        block_bytes=options.block_size * model.slot_bytes,
        blocks_per_sequence=-(-max_model_len // options.block_size),
        state_bytes=model.state_bytes,
        max_num_seqs=options.max_num_seqs,
    )
    shares = share_cache(int(cache_bytes), needs)
    if shares.num_blocks < needs.blocks_per_sequence:
        fitting_len = shares.num_blocks * options.block_size
        if options.max_model_len is not None or fitting_len == 0:
            larger = "raise kv_cache_gib"
            if options.gpu_share < 1 and options.kv_cache_gib is None:
                larger = f"give it more of a GPU than {options.gpu_share:g} (draft_gpu_share)"
            raise ConfigError(
                f"a KV cache of {cache_bytes / GIB:.3g} GiB holds {fitting_len} tokens of "
                f"{model.name!r}, less than one sequence of max_model_len={max_model_len}; "
                f"{larger} or lower max_model_len"
            )
        logger.warning("the KV cache limits max_model_len to %d of %d", fitting_len, max_model_len)
        max_model_len = fitting_len
    if 0 < shares.num_states < options.max_num_seqs:
        logger.warning(
            "the cache holds the recurrent states of %d sequences, fewer than max_num_seqs=%d",
            shares.num_states,
            options.max_num_seqs,
        )
    return max_model_len, shares


def _check_blocks(model: Model, block_size: int) -> None:
    """Raise ConfigError if a block would reach over the edge of a chunk."""
    for chunk_len in (spec.chunk_len for spec in model.layer_specs):
        if chunk_len is not None and chunk_len % block_size:
            raise ConfigError(
                f"block_size is {block_size}, but {model.name!r} attends in chunks of {chunk_len} "
                "tokens (attention_chunk_size), which it must divide; use "
                f"block_size={math.gcd(chunk_len, block_size)}"
            )


def _cache_bytes(device: torch.device, options: CacheOptions) -> float:
    if options.kv_cache_gib is not None:
        return options.kv_cache_gib * GIB
    if device.type == "cuda":
        free_bytes = gpu_memory.free_bytes(device, options.gpu_share)
    else:
        free_bytes = psutil.virtual_memory().available
    return free_bytes * FREE_MEMORY_FRACTION[device.type]
