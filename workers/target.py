"""The target: verifies drafts of many sequences in one forward, prefills included."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from workers.backlog import WorkItem
from workers.drafters.early_exit import EarlyDrafting, EarlyExitDrafter
from workers.errors import (
    GenerationFailedError,
    GrammarStuckError,
    InvalidRequestError,
    TandemError,
)
from workers.isolation import decide_each
from workers.logprobs import token_logprobs
from workers.model import Model
from workers.paged_model import CacheOptions, Ranks
from workers.ratio_test import RuleOfEach
from workers.sampling import NO_TOKEN, SamplingRow
from workers.sampling_params import SamplingParams
from workers.scheduler import ScheduledRun
from workers.step_plan import StepPlan
from workers.step_times import VERIFY_SIZES
from workers.step_worker import StepWorker
from workers.types import NO_DRAFTS, TokenLogprobs, VerifyRequest, VerifyResult
from workers.verification import JudgedRun, Verdict, VerificationRule

Run = ScheduledRun[VerifyRequest]

MAX_LOGPROBS_AT_ONCE = 2**16
"""Numbers of a prompt that one answer carries, about 2 MB: reading them holds a router up for some
20 ms. A longer prompt is answered in parts, of which each but the last asks for the rest."""


class Target(StepWorker[VerifyRequest, VerifyResult]):
    """A model that decides every token."""

    result_type = VerifyResult
    timed_sizes = VERIFY_SIZES

    def __init__(
        self,
        model: Model,
        cache: CacheOptions | None = None,
        *,
        max_batched_tokens: int = 256,
        ranks: Ranks | None = None,
        rule: VerificationRule | None = None,
        early_exit_layer: int | None = None,
    ) -> None:
        """Allocate the cache; raises ConfigError if it cannot be as `cache` says.

        Args:
            max_batched_tokens: bounds the prefill in a step, hence how long a step can take.
            ranks: those that hold the other shards of the model.
            rule: how drafts are judged; by default as each request asks.
            early_exit_layer: how many of the model's first layers draft for the next round; None
                for no drafts.
        """
        super().__init__(
            model,
            cache or CacheOptions(),
            max_batched_tokens=max_batched_tokens,
            ranks=ranks,
            early_exit_layer=early_exit_layer,
        )
        self._rule: VerificationRule = rule or RuleOfEach()
        self._early_exit = EarlyExitDrafter(self._paged, self._sequences, self._grammars)
        self._begun_again: set[str] = set()
        """Sequences that were stuck in their grammar before."""

    def verify(self, batch: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """The target's own tokens for every sequence of the batch; see `run_batch`."""
        return self.run_batch(batch)

    def _check(self, request: VerifyRequest) -> None:
        """Raise InvalidRequestError for unknown tokens, and for drafts that nobody here makes."""
        super()._check(request)
        vocab_size = self._paged.model.vocab_size
        lowest, highest = min(request.new_tokens), max(request.new_tokens)
        if lowest < 0 or highest >= vocab_size:
            raise InvalidRequestError(
                f"token id {lowest if lowest < 0 else highest} is unknown to the model; ids go "
                f"from 0 to {vocab_size - 1}"
            )
        if request.next_k > 0 and not self._paged.has_early_exit:
            raise InvalidRequestError(
                f"next_k is {request.next_k}, but this target makes no drafts; it must be 0"
            )

    def _num_draft_slots(self, request: VerifyRequest, given_len: int) -> int:
        """Drafts up to the first that is no token of ours, or that would pass the end.

        A rule that compares laws has to reject that one itself: to leave out a draft for what it is
        would favour the other tokens that it might have been.
        """
        usable = request.draft_tokens[: max(0, self._paged.max_model_len - given_len)]
        num_known = next((i for i, token in enumerate(usable) if not self._knows(token)), None)
        if num_known is None:
            return len(usable)
        return num_known if request.rule == "coupled" else num_known + 1

    def _knows(self, token: int) -> bool:
        return 0 <= token < self._paged.model.vocab_size

    def _run_tokens(self, run: Run) -> tuple[int, ...]:
        """What the step runs: a draft that is no token of ours is never accepted, so that any does
        in its place."""
        return run.tokens + tuple(token if self._knows(token) else 0 for token in _drafts(run))

    def _serve(self, runs: Sequence[Run]) -> list[VerifyResult]:
        plan = StepPlan()
        for run in runs:
            tokens = self._run_tokens(run)
            # what decides tokens, and all where log-probabilities of the prompt are wanted
            wants_all = _wants_prompt_logprobs(run)
            num_logits = len(tokens) if wants_all else _num_judged_rows(run)
            plan.add(run.sequence, tokens, num_logits=num_logits, committed_len=run.committed_len)
        logits = self._paged.run(plan)  # [len(plan.logit_rows), vocab]
        for run in runs:
            run.record(self._run_tokens(run))
        if any(_wants_prompt_logprobs(run) for run in runs):
            logits = self._take_prompt_logprobs(runs, logits)
        last = [run for run in runs if run.is_last]
        first_rows = accumulate((_num_judged_rows(run) for run in last), initial=0)
        results = [self._give_part(run) for run in runs if self._is_part_due(run)]
        for run, verdict, row in zip(last, self._judge(last, logits), first_rows, strict=False):
            if verdict is None or run.sequence.seq_id not in self._backlog:  # it has failed
                continue
            with self._isolated(run.sequence.seq_id):
                results.append(self._answer(run, verdict, logits, row))
        return self._with_next_drafts(last, results)

    def _with_next_drafts(
        self, runs: Sequence[Run], results: list[VerifyResult]
    ) -> list[VerifyResult]:
        """The results, with the drafts for the next round that were asked for."""
        asking = {run.sequence.seq_id: run for run in runs if run.item.request.next_k > 0}
        drafting = {
            result.seq_id: EarlyDrafting(
                sequence=run.sequence,
                request=run.item.request,
                newest=result.tokens[-1],
                stop_below=run.item.request.next_stop_below,
            )
            for result in results
            if result.tokens and (run := asking.get(result.seq_id)) is not None
        }
        if not drafting:
            return results
        started = self._clock()
        self._early_exit.draft(list(drafting.values()))
        drafting_s = self._clock() - started
        drafts = {seq_id: entry.draft_tokens for seq_id, entry in drafting.items()}
        return [
            dataclasses.replace(
                result, next_drafts=drafts.get(result.seq_id, NO_DRAFTS), drafting_s=drafting_s
            )
            for result in results
        ]

    def _take_prompt_logprobs(self, runs: Sequence[Run], logits: Tensor) -> Tensor:
        """Note what the logits say of prompts; returns the rows that decide tokens.

        # [num_rows, vocab] -> [sum(gamma + 1 of those that are last), vocab]
        """
        kept, row = [], 0
        for run in runs:
            num_rows = num_judged = _num_judged_rows(run)
            if _wants_prompt_logprobs(run):
                num_rows = len(run.tokens) + run.num_draft_slots
                with self._isolated(run.sequence.seq_id):
                    _note_prompt_logprobs(run, logits[row:])
            row += num_rows
            kept.append(logits[row - num_judged : row])
        return torch.cat(kept)

    def _is_part_due(self, run: Run) -> bool:
        """Whether the caller has to take what there is of its prompt's log-probabilities."""
        num_logprobs = len(run.item.prompt_logprobs) * (
            1 + (run.item.request.num_prompt_logprobs or 0)
        )
        is_waiting = not run.is_last and run.sequence.seq_id in self._backlog
        return is_waiting and num_logprobs >= MAX_LOGPROBS_AT_ONCE

    def _give_part(self, run: Run) -> VerifyResult:
        self._backlog.discard(run.sequence.seq_id)
        return self._progress(run.item)

    def _progress(self, item: WorkItem[VerifyRequest]) -> VerifyResult:
        logprobs = tuple(item.prompt_logprobs)
        return dataclasses.replace(super()._progress(item), prompt_logprobs=logprobs)

    def _judge(self, runs: Sequence[Run], logits: Tensor) -> list[Verdict | None]:
        """A verdict on the drafts of each run; None for a run that fails."""
        if not runs:
            return []
        return decide_each(
            lambda each, rows: self._rule.judge(rows, [self._judged_run(run) for run in each]),
            runs,
            logits,
            num_rows=[_num_judged_rows(run) for run in runs],
            isolated=lambda run: self._isolated_in_grammar(run.sequence.seq_id),
        )

    @contextmanager
    def _isolated_in_grammar(self, seq_id: str) -> Iterator[None]:
        """Isolate a sequence; one that is stuck in its grammar is sent again, once: others may have
        used up what the grammar's matchers share, and it has a grammar of its own then."""
        with self._isolated(seq_id):
            try:
                yield
            except GrammarStuckError as error:
                if seq_id in self._begun_again or error.is_final:
                    self._begun_again.discard(seq_id)
                    raise
                self._begun_again.add(seq_id)
                self._backlog.release([seq_id])
                self._failed.append(self.unanswered(seq_id, needs_tokens_from=0))

    def _is_held(self, item: WorkItem[VerifyRequest]) -> bool:
        """See StepWorker."""
        sequence, grammar = item.sequence, item.request.sampling.grammar
        is_shared = sequence.seq_id not in self._begun_again
        if not self._grammars.is_ready(sequence, grammar, is_shared=is_shared):
            return True
        return grammar is not None and not self._grammars.has_next(
            sequence, grammar, remaining=item.remaining, prompt_len=item.request.prompt_len
        )

    def release(self, seq_ids: Iterable[str]) -> list[VerifyResult]:
        """See StepWorker."""
        seq_ids = tuple(seq_ids)
        self._begun_again.difference_update(seq_ids)
        return super().release(seq_ids)

    def _answer(self, run: Run, verdict: Verdict, logits: Tensor, row: int) -> VerifyResult:
        """Roll back the drafts that were rejected; the run's logits begin at `row`.

        Raises GenerationFailedError where the model's scores decide no token, and
        InvalidRequestError where the request's parameters leave none.
        """
        sequence = run.sequence
        decided_len = sequence.cached_len - run.num_draft_slots
        if verdict.tokens[-1] == NO_TOKEN:
            if verdict.num_accepted == 0:
                raise self._no_token(run.item.request, logits[row], decided_len)
            verdict = verdict.before_last()  # the text may end there; if not, the next round fails
        accepted_len = decided_len + verdict.num_accepted
        logprobs: tuple[TokenLogprobs, ...] = ()
        if (num_top := run.item.request.num_logprobs) is not None:
            rows = logits[row : row + len(verdict.tokens)]
            logprobs = token_logprobs(rows, verdict.tokens, num_top=num_top)
        self._sequences.truncate(sequence, accepted_len)
        self._backlog.finish(run.item)
        return VerifyResult(
            seq_id=sequence.seq_id,
            tokens=verdict.tokens,
            num_accepted=verdict.num_accepted,
            num_tested=verdict.num_tested,
            has_slow_masks=self._grammars.is_slow(sequence),
            logprobs=logprobs,
            prompt_logprobs=tuple(run.item.prompt_logprobs),
        )

    def _no_token(self, request: VerifyRequest, scores: Tensor, position: int) -> TandemError:
        """Why the model's scores and the request's parameters decide no token.  # [vocab]"""
        if not scores.max().isfinite():
            return GenerationFailedError(
                f"the scores of {self._paged.model.name!r} are not finite numbers at position "
                f"{position}, so no token can be chosen; try another prompt, other sampling "
                "parameters or dtype=float32"
            )
        if request.sampling.grammar is not None:
            return InvalidRequestError(
                f"no token is allowed at position {position}: the grammar and the other parameters "
                "of the request leave none; try another grammar"
            )
        return InvalidRequestError(
            f"no token is allowed at position {position}: bad_words, min_tokens and the other "
            "parameters of the request leave none; ban fewer tokens"
        )

    def _judged_run(self, run: Run) -> JudgedRun:
        """What decides the token after each that has logits, once the run's tokens are cached."""
        request, tokens = run.item.request, run.sequence.tokens
        num_drafts = run.num_draft_slots
        masks = self._grammars.after_each(
            run.sequence,
            request.sampling.grammar,
            prompt_len=request.prompt_len,
            num_drafts=num_drafts,
        )
        rows = tuple(
            SamplingRow(
                params=request.sampling,
                seed=request.seed,
                position=position,
                history=tokens[:position] if request.sampling.needs_history else (),
                prompt_len=request.prompt_len,
                allowed=allowed,
            )
            for position, allowed in enumerate(masks, start=len(tokens) - num_drafts)
        )
        return JudgedRun(
            draft_tokens=_drafts(run),
            rows=rows,
            rule=request.rule,
            draft_laws=request.draft_law[:num_drafts],
        )

    def _decide(self, logits: Tensor) -> None:
        row = SamplingRow(params=SamplingParams(temperature=0.0), seed=0, position=0)
        run = JudgedRun(draft_tokens=(0,) * (len(logits) - 1), rows=(row,) * len(logits))
        self._rule.judge(logits, [run])


def _drafts(run: Run) -> tuple[int, ...]:
    """The drafts that the step verifies.  # [gamma]"""
    return run.item.request.draft_tokens[: run.num_draft_slots]


def _num_judged_rows(run: Run) -> int:
    """Rows of logits that decide tokens of the run: after each draft and before them all."""
    return 1 + run.num_draft_slots if run.is_last else 0


def _wants_prompt_logprobs(run: Run) -> bool:
    return run.item.request.num_prompt_logprobs is not None


def _note_prompt_logprobs(run: Run, logits: Tensor) -> None:
    """Note the log-probabilities of the prompt's tokens that follow those of the run, once these
    are cached.

    The logits begin with those of the run.  # [at least len(run.tokens), vocab]
    """
    request, tokens = run.item.request, run.item.request.new_tokens
    begin = run.sequence.cached_len - run.num_draft_slots - len(run.tokens) - request.base_len
    end = max(0, min(begin + len(run.tokens) + 1, request.prompt_len - request.base_len))
    if begin < 0:  # of a recurrent model, tokens before base_len are run again
        logits, begin = logits[-begin:], 0
    known = tokens[begin + 1 : end]
    num_top = request.num_prompt_logprobs or 0
    run.item.prompt_logprobs += token_logprobs(logits[: len(known)], known, num_top=num_top)
