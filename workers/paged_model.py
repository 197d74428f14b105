"""A model together with its paged cache and the sequences in it."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from workers.attention import Chunk
from workers.errors import ConfigError
from workers.kv_cache import BlockAllocator, CachedSequence, SequenceTable
from workers.model import Model
from workers.paged_forward import PagedForward, Ranks, StepPlan
from workers.types import WorkerInfo

logger = logging.getLogger(__name__)

GIB = 1024**3
UNKNOWN_TOKEN = 0
"""What a draft model runs in place of ids that only its target has; drafts may be worse there."""
# Several workers and the operating system share main memory; a GPU belongs to one worker.
FREE_MEMORY_FRACTION = {"cpu": 0.3, "cuda": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How much to cache. None lets the worker decide."""

    block_size: int = 16
    max_model_len: int | None = None
    """Longest sequence, prompt and completion; by default what the model's positions allow."""
    max_num_seqs: int = 64
    """Sequences that should fit at full length, if memory allows."""
    kv_cache_gib: float | None = None
    """By default a fraction of the memory that is free once the model is loaded."""
    prefix_caching: bool = True
    """Whether sequences that begin alike share cache blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tokens of one sequence to run in a step."""

    sequence: CachedSequence
    tokens: Sequence[int]
    num_logits: int
    """How many of the last tokens need logits."""


class PagedModel:
    """Runs tokens of many sequences in one forward and keeps their keys and values."""

    def __init__(self, model: Model, options: CacheOptions, ranks: Ranks | None = None) -> None:
        """Allocate the cache; raises ConfigError if `options` cannot be met.

        Args:
            ranks: of a group whose steps this rank decides.
        """
        self.model = model
        self.max_model_len, num_blocks = size_cache(model, options, ranks)
        self._block_size = options.block_size
        self._forward = PagedForward(model, num_blocks=num_blocks, block_size=options.block_size)
        self._ranks = ranks
        self.sequences = SequenceTable(
            BlockAllocator(num_blocks, options.block_size), with_prefixes=options.prefix_caching
        )
        self.num_tokens_run = 0

    def start_compiling(self) -> threading.Thread:
        """See PagedForward."""
        return self._forward.start_compiling(max_model_len=self.max_model_len)

    @property
    def is_compiled(self) -> bool:
        """See PagedForward."""
        return self._forward.is_compiled

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know of: sentences."""
        return self.model.text_warnings + self._forward.warnings

    @property
    def is_in_group(self) -> bool:
        """Whether other ranks run each step too."""
        return self._ranks is not None

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(
            model=self.model.name,
            vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.model.eos_token_ids,
            num_blocks=self.sequences.allocator.num_blocks,
            block_size=self._block_size,
        )

    def run(self, runs: Sequence[Run]) -> Tensor:
        """Run and cache the tokens; blocks for them must have been reserved.

        Returns the wanted logits, run by run.  # [sum(num_logits), vocab]
        """
        plan = _plan(runs, vocab_size=self.model.vocab_size)
        if self._ranks is not None:
            self._ranks.announce(plan)
        logits = self._forward.run(plan)
        self.num_tokens_run += len(plan.tokens)
        for run in runs:
            run.sequence.tokens += run.tokens
        return logits


def _plan(runs: Sequence[Run], *, vocab_size: int) -> StepPlan:
    """The step that runs these tokens; ids that the model lacks are run as UNKNOWN_TOKEN."""
    tokens: list[int] = []
    chunks: list[Chunk] = []
    logit_rows: list[int] = []
    for run in runs:
        chunks.append(
            Chunk(
                cached_len=run.sequence.cached_len,
                num_new=len(run.tokens),
                block_table=run.sequence.block_table,
            )
        )
        tokens += (token if 0 <= token < vocab_size else UNKNOWN_TOKEN for token in run.tokens)
        logit_rows += range(len(tokens) - run.num_logits, len(tokens))
    return StepPlan(chunks=chunks, tokens=tokens, logit_rows=logit_rows)


def size_cache(model: Model, options: CacheOptions, ranks: Ranks | None = None) -> tuple[int, int]:
    """The longest sequence to serve and the number of blocks to allocate, alike for all ranks.

    Raises ConfigError if `options` cannot be met.
    """
    max_model_len, num_blocks = _size_cache(model, options)
    if ranks is not None:
        max_model_len, num_blocks = ranks.least(max_model_len), ranks.least(num_blocks)
    return max_model_len, num_blocks


def _size_cache(model: Model, options: CacheOptions) -> tuple[int, int]:
    """The longest sequence to serve and the number of blocks to allocate."""
    max_model_len = options.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {model.name!r} has positions for "
            f"{model.max_position} tokens only; use at most that"
        )
    block_bytes = options.block_size * model.slot_bytes
    cache_bytes = _cache_bytes(model.device, options)
    blocks_per_sequence = -(-max_model_len // options.block_size)
    num_blocks = min(int(cache_bytes // block_bytes), blocks_per_sequence * options.max_num_seqs)
    if num_blocks < blocks_per_sequence:
        fitting_len = num_blocks * options.block_size
        if options.max_model_len is not None or fitting_len == 0:
            raise ConfigError(
                f"a KV cache of {cache_bytes / GIB:.3g} GiB holds {fitting_len} tokens of "
                f"{model.name!r}, less than one sequence of max_model_len={max_model_len}; raise "
                "kv_cache_gib or lower max_model_len"
            )
        logger.warning("the KV cache limits max_model_len to %d of %d", fitting_len, max_model_len)
        max_model_len = fitting_len
    return max_model_len, num_blocks


def _cache_bytes(device: torch.device, options: CacheOptions) -> float:
    if options.kv_cache_gib is not None:
        return options.kv_cache_gib * GIB
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        free_bytes = psutil.virtual_memory().available
    return free_bytes * FREE_MEMORY_FRACTION[device.type]
