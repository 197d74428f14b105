"""`tandem bench exact`: where texts differ from plain decoding, and by how little.

In exact arithmetic speculation never changes a text. In bf16 the logits of a token depend on how
many tokens ran with it, so two that nearly tie may change places, with speculation or without:
plain decoding in a batch differs from plain decoding alone in the same way. This counts both, and
shows for each text that differs how far the two tokens lay apart where it first did.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer

from cluster import bundled
from tandem.bench.report import environment, markdown_table, write_report
from tandem.bench.texts import make_prompts
from tandem.demo.grow import grown_target
from workers.drafters.model import ModelDrafter, load_draft_model
from workers.model import Model, load_model
from workers.paged_model import CacheOptions, PagedModel, Run
from workers.target import Target
from workers.types import ProposeRequest, SamplingParams, VerifyRequest

GREEDY = SamplingParams(temperature=0.0)
BATCH_SIZE = 8
GAMMAS = (2, 4, 8)
MAX_LEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessOptions:
    target: str | None
    """None grows the bundled target to 287M parameters."""
    draft: str
    num_prompts: int
    max_tokens: int
    with_compile: bool
    output: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessRow:
    """One way of decoding against plain decoding alone."""

    name: str
    num_texts: int
    gaps: tuple[float, ...]
    """For each text that differs: between the logits of the two tokens where it first does, in
    fp32 arithmetic with the same weights."""


class _Decoder:
    """A target and a drafter without anything between them."""

    def __init__(self, target: Target, drafter: ModelDrafter) -> None:
        self._target = target
        self._drafter = drafter
        self._num_sequences = 0

    def decode(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, gamma: int
    ) -> list[list[int]]:
        """All prompts as one batch, greedily; returns what follows each."""
        texts = [list(prompt) for prompt in prompts]
        seq_ids = [f"{self._num_sequences + i}" for i in range(len(prompts))]
        self._num_sequences += len(prompts)
        cached = [0] * len(prompts)
        while running := [
            i for i, text in enumerate(texts) if len(text) < len(prompts[i]) + max_tokens
        ]:
            drafts = {i: self._draft(seq_ids[i], texts[i], gamma) for i in running if cached[i]}
            results = self._target.verify(
                [
                    VerifyRequest(
                        seq_id=seq_ids[i],
                        base_len=cached[i],
                        new_tokens=tuple(texts[i][cached[i] :]),
                        draft_tokens=drafts.get(i, ()),
                        prompt_len=len(prompts[i]),
                        sampling=GREEDY,
                    )
                    for i in running
                ]
            )
            for i, result in zip(running, results, strict=True):
                cached[i] = len(texts[i]) + result.num_accepted
                texts[i] += result.tokens
        self._target.release(seq_ids)
        self._drafter.release(seq_ids)
        return [
            text[len(prompt) : len(prompt) + max_tokens]
            for text, prompt in zip(texts, prompts, strict=True)
        ]

    def _draft(self, seq_id: str, text: Sequence[int], gamma: int) -> tuple[int, ...]:
        if gamma == 0:
            return ()
        request = ProposeRequest(
            seq_id=seq_id,
            base_len=0,
            new_tokens=tuple(text),
            k=gamma,
            prompt_len=len(text),
            sampling=GREEDY,
        )
        return self._drafter.propose([request])[0].draft_tokens


def run_exactness(options: ExactnessOptions) -> list[ExactnessRow]:
    """Decode in all ways; write JSON and a table below `options.output`."""
    options.output.mkdir(parents=True, exist_ok=True)
    target_name = bundled.resolve(options.target or grown_target(options.output))
    # no prefix cache: every text is to be computed as its way of decoding does
    cache = CacheOptions(max_num_seqs=BATCH_SIZE, max_model_len=MAX_LEN, prefix_caching=False)
    target = Target(load_model(target_name), cache)
    drafter = ModelDrafter(load_draft_model(bundled.resolve(options.draft)), cache)
    if options.with_compile:
        for worker in (target, drafter):
            worker.start_compiling().join()
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    prompts = [tokenizer.encode(text) for text in make_prompts("easy", options.num_prompts)]
    decoder = _Decoder(target, drafter)

    def decode(size: int, gamma: int) -> list[list[int]]:
        batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        name = f"gamma {gamma}, {size} at a time"
        return [
            text
            for batch in tqdm(batches, desc=name)
            for text in decoder.decode(batch, options.max_tokens, gamma)
        ]

    plain = decode(1, 0)
    ways = {f"plain, {BATCH_SIZE} at a time": decode(BATCH_SIZE, 0)}
    ways |= {f"gamma {gamma}, alone": decode(1, gamma) for gamma in GAMMAS}
    ways |= {f"gamma 4, {BATCH_SIZE} at a time": decode(BATCH_SIZE, 4)}
    reference = load_model(target_name, dtype="float32")
    rows = [
        ExactnessRow(name=name, num_texts=len(texts), gaps=_gaps(reference, prompts, plain, texts))
        for name, texts in ways.items()
    ]
    report = {
        **environment(),
        "options": {**asdict(options), "output": str(options.output), "target": target_name},
        "rows": [asdict(row) for row in rows],
    }
    write_report(options.output, "exactness", report, format_table(rows))
    return rows


def format_table(rows: Sequence[ExactnessRow]) -> str:
    """The rows as a Markdown table."""
    columns: dict[str, Callable[[ExactnessRow], str]] = {
        "decoding": lambda row: row.name,
        "texts": lambda row: str(row.num_texts),
        "that differ": lambda row: str(len(row.gaps)),
        "logit gaps there": lambda row: ", ".join(f"{gap:.3f}" for gap in sorted(row.gaps)),
    }
    return markdown_table(columns, rows)


def _gaps(
    reference: Model,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> tuple[float, ...]:
    gaps = []
    for prompt, expected, text in zip(prompts, plain, texts, strict=True):
        pairs = enumerate(zip(expected, text, strict=True))
        first = next((i for i, (one, other) in pairs if one != other), None)
        if first is not None:
            prefix = [*prompt, *expected[:first]]
            gaps.append(_logit_gap(reference, prefix, expected[first], text[first]))
    return tuple(gaps)


def _logit_gap(reference: Model, prefix: Sequence[int], one: int, other: int) -> float:
    """Between two tokens that may follow a prefix."""
    paged = PagedModel(reference, CacheOptions(max_num_seqs=1, max_model_len=MAX_LEN))
    sequence, _ = paged.sequences.synchronise("s", 0, prefix)
    paged.sequences.reserve(sequence, len(prefix))
    (logits,) = paged.run([Run(sequence=sequence, tokens=prefix, num_logits=1)])
    return float((logits[one] - logits[other]).abs())
