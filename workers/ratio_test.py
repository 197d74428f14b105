"""The rules that compare the target's law with the drafter's, over the logits of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.block_verification import decide_as_block
from workers.draft_law import DraftLaw, read_laws
from workers.rejection import Decision, Happens, LawsAtDraft, Number, decide_by_rejection, residual
from workers.sampling import SamplingRow, law_logits, sample
from workers.sampling_params import SamplingParams
from workers.streams import Stream, uniform
from workers.types import Rule
from workers.verification import CoupledRule, JudgedRun, Verdict, VerificationRule

Decide = Callable[[Sequence[LawsAtDraft], Happens], Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """A run, where its rows begin in the batch, and the laws that its drafts were drawn from."""

    run: JudgedRun
    first_row: int
    laws: list[DraftLaw]

    def happens(self, index: int, probability: Number) -> bool:
        """See Happens; the same whenever the round is tried again."""
        rows = self.run.rows
        number = uniform(
            rows[0].seed,
            rows[index].position,
            stream=Stream.ACCEPTANCE,
            round_len=rows[0].position,
        )
        return bool(number < probability)


class RatioTest:
    """Accepts drafts by how likely they are by both laws; the text has the target's law.

    All rows are sampled ones. Whatever a drafter brings is judged exactly, if neither it nor how
    many drafts there are depends on the noise of this rule or of the target's own samples.
    """

    def __init__(self, decide: Decide) -> None:
        self._decide = decide

    def judge(self, logits: Tensor, runs: Sequence[JudgedRun]) -> list[Verdict]:
        """See VerificationRule."""
        # a row without a finite highest score has no law: all of it is nan
        log_p = law_logits(logits, [row for run in runs for row in run.rows]).log_softmax(dim=-1)
        first_rows = accumulate((len(run.rows) for run in runs), initial=0)
        judged = [
            _Judged(run=run, first_row=row, laws=read_laws(run.draft_laws, run.draft_tokens))
            for run, row in zip(runs, first_rows, strict=False)
        ]
        compared = _compare(log_p, judged)
        decisions = [
            self._decide(laws, entry.happens) for entry, laws in zip(judged, compared, strict=True)
        ]
        last_tokens = _sample_last(log_p, judged, compared, decisions)
        return [
            _verdict(entry.run.draft_tokens, decision.num_accepted, token)
            for entry, decision, token in zip(judged, decisions, last_tokens, strict=True)
        ]


class RuleOfEach:
    """Judges every run by the rule that its request has chosen."""

    def __init__(self) -> None:
        self._rules: dict[Rule, VerificationRule] = {
            "coupled": CoupledRule(),
            "rejection": RatioTest(decide_by_rejection),
            "block": RatioTest(decide_as_block),
        }

    def judge(self, logits: Tensor, runs: Sequence[JudgedRun]) -> list[Verdict]:
        """See VerificationRule."""
        rules = {run.rule for run in runs}
        if len(rules) == 1:
            return self._rules[rules.pop()].judge(logits, runs)
        parts = logits.split([len(run.rows) for run in runs])
        verdicts: dict[int, Verdict] = {}
        for rule in rules:
            chosen = [index for index, run in enumerate(runs) if run.rule == rule]
            rows = torch.cat([parts[index] for index in chosen])
            of_rule = self._rules[rule].judge(rows, [runs[index] for index in chosen])
            verdicts.update(zip(chosen, of_rule, strict=True))
        return [verdicts[index] for index in range(len(runs))]


def _compare(log_p: Tensor, judged: Sequence[_Judged]) -> list[list[LawsAtDraft]]:
    """Both laws at every draft of each run.  # log_p [num_rows, vocab]"""
    rows = [entry.first_row + index for entry in judged for index in range(len(entry.laws))]
    laws = [law for entry in judged for law in entry.laws]
    if not laws:
        return [[] for _ in judged]
    found = iter(
        _look_up(
            log_p,
            np.repeat(rows, [len(law.tokens) for law in laws]),
            np.concatenate([law.tokens for law in laws]),
            [len(law.tokens) for law in laws],
        )
    )
    return [
        [
            _laws_at_draft(token, law, next(found))
            for token, law in zip(entry.run.draft_tokens, entry.laws, strict=True)
        ]
        for entry in judged
    ]


def _look_up(
    log_p: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], widths: Sequence[int]
) -> list[NDArray[np.float64]]:
    """The probabilities of these tokens in these rows, law by law; 0 for one that is none of ours.

    # log_p [num_rows, vocab]; rows, tokens [sum(widths)]
    """
    is_known = (tokens >= 0) & (tokens < log_p.shape[-1])
    index = torch.from_numpy(np.stack([rows, np.where(is_known, tokens, 0)])).to(log_p.device)
    p = log_p[index[0], index[1]].double().exp().cpu().numpy()
    return np.split(np.where(is_known, p, p * 0.0), np.cumsum(widths)[:-1])


def _laws_at_draft(token: int, law: DraftLaw, p: NDArray[np.float64]) -> LawsAtDraft:
    """A row without a law gives no token any probability.  # p [width]"""
    has_law = not np.isnan(p).any()
    return LawsAtDraft(
        drafted=int(np.flatnonzero(law.tokens == token)[0]),
        p=np.nan_to_num(p),
        q=law.probabilities,
        others=max(1.0 - float(p.sum()), 0.0) if has_law else 0.0,
    )


def _sample_last(
    log_p: Tensor,
    judged: Sequence[_Judged],
    compared: Sequence[Sequence[LawsAtDraft]],
    decisions: Sequence[Decision],
) -> list[int]:
    """The target's own token of each run: of the residual law, or of p where no draft is left.

    It is drawn with the noise of the target's own samples.
    """
    first_rows = torch.tensor([entry.first_row for entry in judged])
    num_accepted = torch.tensor([decision.num_accepted for decision in decisions])
    last = log_p[(first_rows + num_accepted).to(log_p.device)]  # a copy: [num_runs, vocab]
    rejected = [
        (row, entry.laws[decision.num_accepted].tokens, laws[decision.num_accepted], decision.scale)
        for row, (entry, laws, decision) in enumerate(zip(judged, compared, decisions, strict=True))
        if decision.num_accepted < len(laws)
    ]
    if rejected:
        rows = np.repeat([row for row, *_ in rejected], [len(tokens) for _, tokens, *_ in rejected])
        tokens = np.concatenate([tokens for _, tokens, *_ in rejected])
        left = np.concatenate([residual(laws, scale) for *_, laws, scale in rejected])
        is_known = (tokens >= 0) & (tokens < log_p.shape[-1])
        index = torch.from_numpy(np.stack([rows, tokens])[:, is_known]).to(log_p.device)
        last[index[0], index[1]] = torch.from_numpy(left[is_known]).log().to(last)
    return sample(
        last, [_last_row(entry.run, d) for entry, d in zip(judged, decisions, strict=True)]
    )


def _last_row(run: JudgedRun, decision: Decision) -> SamplingRow:
    """What draws from logarithms of the law itself."""
    row = run.rows[decision.num_accepted]
    return SamplingRow(params=SamplingParams(), seed=row.seed, position=row.position)


def _verdict(draft_tokens: Sequence[int], num_accepted: int, last_token: int) -> Verdict:
    """The verdict: a rejected draft counts as tested, those behind it do not."""
    return Verdict(
        tokens=(*draft_tokens[:num_accepted], last_token),
        num_accepted=num_accepted,
        num_tested=min(num_accepted + 1, len(draft_tokens)),
    )
