"""A service whose target writes given texts in commits of a given size; all else is real."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from deployments.router.admission import AdmissionLimits
from deployments.router.chat.template import ChatTemplate
from deployments.router.drafting.overlap import FixedOverlap
from deployments.router.drafting.remote import PooledDrafter
from deployments.router.health import Health
from deployments.router.loop import LoopOptions, RoundLoop
from deployments.router.policy.gamma import FixedGamma
from deployments.router.service import GenerationService, ServedModel
from deployments.router.speculation import Policies
from tests.fakes import END, RecordingObserver, ScriptedDrafter, byte_tokenizer
from workers.types import ProposeRequest, Reply, VerifyRequest, VerifyResult, WorkerInfo

MAX_MODEL_LEN = 4096
MODEL = "scripted"


def chat_tokenizer(template: str | None, special: Sequence[str] = ()) -> Any:
    """Bytes as tokens, most of them, with END at the end of texts and further special tokens."""
    backend = byte_tokenizer(["the cat sat on the mat"])
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        bos_token=END,
        chat_template=template,
        extra_special_tokens=list(special),
    )


class ScriptedTarget:
    """A WorkerClient of targets that write what stands in a script, by a sequence's choice."""

    def __init__(self, scripts: Sequence[Sequence[int]]) -> None:
        self._scripts = scripts

    def expected(self, seq_id: str, position: int) -> Sequence[int]:
        """What the target writes from an output position on."""
        choice = int(seq_id.rpartition("-")[2])
        return self._scripts[choice % len(self._scripts)][position:]

    async def call(
        self,
        replica_id: str | None,
        batch: Sequence[VerifyRequest],
        *,
        timeout_s: float,  # noqa: ARG002
    ) -> Reply[VerifyResult]:
        return Reply(
            replica_id=replica_id or "scripted",
            compute_s=0.0,
            num_steps=1,
            num_tokens=1,
            num_prefill_tokens=0,
            results=tuple(map(self._verify, batch)),
        )

    def _verify(self, request: VerifyRequest) -> VerifyResult:
        position = request.base_len + len(request.new_tokens) - request.prompt_len
        tokens = tuple(self.expected(request.seq_id, position))
        drafts = request.draft_tokens
        num_accepted = next(
            (i for i, pair in enumerate(zip(drafts, tokens, strict=False)) if pair[0] != pair[1]),
            min(len(drafts), len(tokens) - 1),
        )
        return VerifyResult(
            seq_id=request.seq_id,
            tokens=tokens[: num_accepted + 1],
            num_accepted=num_accepted,
            num_tested=min(len(drafts), num_accepted + 1),
        )

    def release(self, replica_id: str | None, seq_ids: Sequence[str]) -> None: ...

    async def find(self) -> str:
        return "scripted"


@asynccontextmanager
async def scripted_service(
    answers: Sequence[str],
    tokenizer: Any,
    *,
    commit_len: int = 4,
    chat_stop: tuple[str, ...] = (),
    **template_options: Any,
) -> AsyncIterator[GenerationService]:
    """A service whose completion i of a request is the answer i, that many tokens at a time."""
    eos = tokenizer.convert_tokens_to_ids(END)
    scripts = [[*tokenizer.encode(text, add_special_tokens=False), eos] for text in answers]
    target = ScriptedTarget(scripts)

    def draft(request: ProposeRequest) -> Sequence[int]:
        given = request.base_len + len(request.given_tokens) - request.prompt_len
        return target.expected(request.seq_id, given)[: request.k]

    loop = RoundLoop(
        targets=target,
        drafters=[
            PooledDrafter(ScriptedDrafter(draft), timeout_s=5.0, max_model_len=MAX_MODEL_LEN)
        ],
        policies=Policies(
            gamma=FixedGamma(commit_len - 1),
            overlap=FixedOverlap(is_on=False),
            max_gamma=16,
            max_model_len=MAX_MODEL_LEN,
        ),
        observer=RecordingObserver(),
        options=LoopOptions(),
        clock=time.monotonic,
    )
    info = WorkerInfo(
        model=MODEL,
        vocab_size=len(tokenizer),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(eos,),
        num_blocks=1,
        block_size=16,
    )
    has_template = tokenizer.chat_template is not None or "source" in template_options
    service = GenerationService(
        ServedModel(
            name=MODEL,
            tokenizer=tokenizer,
            info=info,
            created=1,
            chat_template=ChatTemplate(tokenizer, **template_options) if has_template else None,
            chat_stop=chat_stop,
        ),
        loop,
        AdmissionLimits(max_running=16, max_waiting=64),
        Health(recovery_timeout_s=60.0, stall_timeout_s=60.0, clock=time.monotonic),
    )
    try:
        yield service
    finally:
        await loop.close()
