"""What target and drafter have in common: work arrives at any time and is done step by step."""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from workers.backlog import Backlog, WorkItem
from workers.cpu import step_threads
from workers.errors import (
    ContextLengthError,
    InvalidRequestError,
    KVCacheExhaustedError,
    TandemError,
)
from workers.grammar_compiler import GrammarCompiler
from workers.grammar_masks import GrammarMasks
from workers.isolation import DeviceLost
from workers.kv_cache import BlockAllocator, SequenceTable
from workers.model import Model
from workers.paged_model import CacheOptions, PagedModel, Ranks
from workers.sampling_params import AS_BEFORE
from workers.scheduler import ScheduledRun, schedule
from workers.step_times import Size, StepTable
from workers.tokenizer import find_tokenizer
from workers.types import WorkerInfo, WorkRequest, WorkResult

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

TIMED_CONTEXT_LEN = 128
"""Tokens before those of a timed step: a short prompt's."""


class StepWorker(ABC, Generic[RequestT, ResultT]):
    """`submit`, `step` and `release` serve many callers; `run_batch` serves one.

    A step is three calls: `schedule` chooses what of the backlog is run, `PagedModel.run` runs it,
    and the rest of `_serve` samples and answers.

    Whatever is raised on behalf of one sequence ends that sequence, with a result that says why.
    What a step raises on behalf of all, such as the forward pass, leaves the worker unusable.
    """

    result_type: type[ResultT]
    """What requests are answered with."""
    timed_sizes: Sequence[Size]
    """The steps that its table of times has, most important first."""

    def __init__(
        self,
        model: Model,
        cache: CacheOptions,
        *,
        max_batched_tokens: int,
        ranks: Ranks | None = None,
        early_exit_layer: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._paged = PagedModel(model, cache, ranks, early_exit_layer=early_exit_layer)
        self._sequences = SequenceTable(
            BlockAllocator(self._paged.num_blocks, cache.block_size),
            with_prefixes=cache.prefix_caching and not model.state_specs,
            num_states=self._paged.num_states if model.state_specs else None,
        )
        self._backlog: Backlog[RequestT] = Backlog(self._sequences, turn_len=max_batched_tokens)
        self._max_batched_tokens = max_batched_tokens
        self._clock = clock
        self._grammars = GrammarMasks(self._make_grammar_compiler(model))
        self._failed: list[ResultT] = []
        """Results of sequences that have failed since they were last taken."""
        self.step_table = StepTable(
            [size for size in self.timed_sizes if size[1] <= size[0] * self._paged.max_model_len],
            self.time_step,
            forward=lambda: self._paged.forward,
        )

    def _make_grammar_compiler(self, model: Model) -> GrammarCompiler:
        find = partial(find_tokenizer, model.source)
        return GrammarCompiler(find, vocab_size=model.vocab_size, end_tokens=model.eos_token_ids)

    def start_compiling(self) -> threading.Thread:
        """See PagedModel."""
        return self._paged.start_compiling()

    def start_loading_grammars(self) -> None:
        """Begin to read the vocabulary, for which the first request with a grammar would wait."""
        self._grammars.start_loading()

    def on_grammar_ready(self, call: Callable[[], object]) -> None:
        """Have `call` called, in any thread, when another step may serve what waits."""
        self._grammars.on_ready = call

    @abstractmethod
    def _num_draft_slots(self, request: RequestT, given_len: int) -> int:
        """Cache slots wanted for drafts, behind the `given_len` tokens that are given."""

    @abstractmethod
    def _serve(self, runs: Sequence[ScheduledRun[RequestT]]) -> list[ResultT]:
        """Run what was scheduled, at least one sequence; returns the answers."""

    @abstractmethod
    def _decide(self, logits: Tensor) -> None:
        """Decide tokens as a step does, for its time.  # [num_rows, vocab]"""

    def unanswered(
        self,
        seq_id: str,
        *,
        needs_tokens_from: int | None = None,
        is_released: bool = False,
        error: str = "",
        is_refused: bool = False,
    ) -> ResultT:
        """The result of a request that was not served."""
        return self.result_type(
            seq_id=seq_id,
            needs_tokens_from=needs_tokens_from,
            is_released=is_released,
            error=error,
            is_refused=is_refused,
        )

    @property
    def is_in_group(self) -> bool:
        """Whether other ranks take part in its steps."""
        return self._paged.is_in_group

    @property
    def info(self) -> WorkerInfo:
        return replace(
            self._paged.info,
            step_times=self.step_table.times,
            steps_version=self.step_table.version,
        )

    @property
    def is_compiled(self) -> bool:
        """Whether steps are run by a compiled or recorded forward, not by the model's own."""
        return self._paged.is_compiled

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences that an operator should read."""
        return self._paged.warnings

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def num_used_blocks(self) -> int:
        return self._sequences.allocator.num_used

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of new sequences since the start."""
        return self._sequences.num_prompt_tokens

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens of new sequences that were in the cache already, since the start."""
        return self._sequences.num_prefix_tokens

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their cache to others, since the start; each is run again later."""
        return self._backlog.num_preemptions

    @property
    def num_tokens_run(self) -> int:
        """Tokens that steps have run since the start."""
        return self._paged.num_tokens_run

    @property
    def num_waiting(self) -> int:
        """Requests accepted and not answered."""
        return len(self._backlog)

    @property
    def has_only_prompts(self) -> bool:
        """Whether no text that goes on is among what is accepted and not answered: nothing but
        prompts, or what must be read again at length. Also if there is nothing."""
        return self._backlog.has_only_prompts

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts that wait to be run, as many as the next step has room for."""
        return min(self._backlog.num_prefill_tokens, self._max_batched_tokens)

    def run_batch(self, batch: Sequence[RequestT]) -> list[ResultT]:
        """Serve a batch to the end, in as many steps as its prefills need.

        Raises KVCacheExhaustedError if it cannot fit beside the sequences that are cached.
        """
        results = {result.seq_id: result for request in batch for result in self.submit(request)}
        while len(results) < len(batch):
            finished, has_run = self.step()
            if not finished and not has_run and not self._wait_for_grammar():
                raise KVCacheExhaustedError(
                    f"{len(batch) - len(results)} sequences of the batch do not fit beside the "
                    f"{self.num_sequences} that are cached; release some or raise kv_cache_gib"
                )
            results.update({result.seq_id: result for result in finished})
        return [results[request.seq_id] for request in batch]

    def submit(self, request: RequestT) -> list[ResultT]:
        """Accept a request for a coming step; returns the answers that need no step.

        An unanswered request for the same sequence is answered as released: its caller has given
        it up. A request that cannot be served is answered with an error.
        """
        results = self._give_up(request.seq_id)
        with self._isolated(request.seq_id):
            self._check(request)
            sequence, remaining = self._sequences.synchronise(
                request.seq_id,
                request.base_len,
                request.given_tokens,
                salt=request.cache_salt,
                may_reuse=request.may_reuse,
            )
            if request.sampling != AS_BEFORE:
                sequence.sampling = request.sampling
            if remaining is None or sequence.sampling is None:
                needed_from = 0 if sequence.sampling is None else sequence.cached_len
                results.append(self.unanswered(request.seq_id, needs_tokens_from=needed_from))
            else:
                request = replace(request, sampling=sequence.sampling)
                self._backlog.add(WorkItem(request=request, sequence=sequence, remaining=remaining))
        return results + self._take_failed()

    def _give_up(self, seq_id: str) -> list[ResultT]:
        """Answer the sequence's request that waits, if there is one."""
        has_waited = self._backlog.discard(seq_id)
        return [self.unanswered(seq_id, is_released=True)] if has_waited else []

    def _is_held(self, item: WorkItem[RequestT]) -> bool:  # noqa: ARG002
        """Whether the newest of the item's tokens waits for its grammar: no step does."""
        return False

    def _wait_for_grammar(self) -> bool:
        """Wait until an item that is held can go on; returns whether there was any."""
        for item in self._backlog.in_turn():
            if item.request.sampling.grammar is not None and self._is_held(item):
                self._grammars.wait(item.sequence, item.request.sampling.grammar)
                return True
        return False

    def _check(self, request: RequestT) -> None:
        """Raise ContextLengthError if the sequence can never fit, InvalidRequestError for a weight
        by which no turns can be taken."""
        if not 0 < request.weight < math.inf:
            raise InvalidRequestError(f"weight is {request.weight}; it must be a number above 0")
        num_given = len(request.given_tokens)
        length, limit = request.base_len + num_given, self._paged.max_model_len
        if not request.new_tokens or length > limit:
            raise ContextLengthError(
                f"sequence {request.seq_id} has {length} tokens, {num_given} of them "
                f"new; it must have at least one new and at most {limit} in all"
            )

    @contextmanager
    def _isolated(self, seq_id: str) -> Iterator[None]:
        """Let whatever is raised within, but `DeviceLost`, end this sequence and nothing else."""
        try:
            yield
        except TandemError as error:
            self._fail(seq_id, str(error), is_refused=isinstance(error, InvalidRequestError))
        except DeviceLost:
            raise
        except Exception:
            logger.exception("sequence %s has failed", seq_id)
            self._fail(seq_id, "internal error; the worker's log says more")

    def _fail(self, seq_id: str, error: str, *, is_refused: bool = False) -> None:
        """Forget a sequence, and have its result say why."""
        self._backlog.release([seq_id])
        self._failed.append(self.unanswered(seq_id, error=error, is_refused=is_refused))

    def _take_failed(self) -> list[ResultT]:
        failed, self._failed = self._failed, []
        return failed

    def step(self) -> tuple[list[ResultT], bool]:
        """Serve some of what waits; returns the answers and whether the model has run.

        Neither means that what waits has no room until a sequence is released, or waits for its
        grammar; see `on_grammar_ready`.
        """
        runs = schedule(
            self._backlog,
            max_batched_tokens=self._max_batched_tokens,
            is_held=self._is_held,
            num_draft_slots=self._num_draft_slots,
            isolated=self._isolated,
        )
        results = self._serve(runs) if runs else []
        for seq_id in self._backlog.take_preempted():
            results.append(self.unanswered(seq_id, needs_tokens_from=0))
        return results + self._take_failed(), bool(runs)

    def release(self, seq_ids: Iterable[str]) -> list[ResultT]:
        """Forget sequences and free their blocks; answers those that were waiting."""
        return [
            self.unanswered(seq_id, is_released=True) for seq_id in self._backlog.release(seq_ids)
        ]

    def report_progress(self, seq_ids: Iterable[str]) -> list[ResultT]:
        """Answer waiting requests with what their caches lack, without losing those.

        So that a caller hears from a worker that is busy for long: it asks again for the rest.
        """
        return [
            self._progress(item)
            for seq_id in seq_ids
            if (item := self._backlog.take(seq_id)) is not None
        ]

    def _progress(self, item: WorkItem[RequestT]) -> ResultT:
        """What has come of work that was begun."""
        sequence = item.sequence
        return self.unanswered(sequence.seq_id, needs_tokens_from=sequence.cached_len)

    def park_threads(self) -> None:
        """Let other processes have the cores; called where nothing waits for a step."""
        if torch.get_num_threads() > 1 and self._paged.model.device.type == "cpu":
            step_threads.park()

    def time_step(self, size: Size) -> float:
        """Seconds of a step of that size, which is no sequence's and is not counted."""
        plan = self._paged.scratch_plan(*size, context_len=TIMED_CONTEXT_LEN)
        started = self._clock()
        self._decide(self._paged.run(plan, is_counted=False))
        return self._clock() - started

    def check_integrity(self) -> None:
        """Assert that blocks, reference counts and sequences agree."""
        self._sequences.check_integrity()
