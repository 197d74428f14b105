"""The sampler: one law for target and drafters, decided by counter-based noise.

The token at absolute position i of a sequence is argmax_v(logits_v / T + gumbel(seed, i, v)), an
exact sample of softmax(logits / T) (Gumbel-max). The noise depends on nothing but its three keys,
so target and drafter, in whatever process and batch, perturb a position alike: that makes their
samples coincide often, and the text independent of who guessed what (Daliri, Musco and Suresh
2024, arXiv:2408.07978).
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cpu import native
from workers.sampling_params import SamplingParams
from workers.truncation import scale_and_truncate
from workers.types import signed_64

WEIGHT_OF_PROBABILITY = 0.2
"""The exponent of a sampled token's probability in its confidence. Without it, the log loss about
the target's agreement was 4 to 7 % more (easy, hard and copied texts, temperatures 0.4 to 1.2)."""
NO_TOKEN = -1
"""Stands for the token of a row without a finite highest score."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of logits that `csrc/sample.cpp` reads."""
BIASES_OF_BYTE = torch.tensor(
    [[0.0 if byte >> bit & 1 else float("-inf") for bit in range(8)] for byte in range(256)]
)
"""What eight tokens' logits are added, by the bits that allow them.  # [256, 8]"""
_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What decides one row of logits besides the logits."""

    params: SamplingParams
    seed: int
    position: int
    """Absolute position, prompt included, of the token that the row decides."""
    history: Sequence[int] = ()
    """All tokens before `position`; read only where the parameters need them."""
    prompt_len: int = 0
    allowed: Tensor | None = None
    """The tokens that a grammar allows, one bit each, the lowest first; None where it does not say.
    # [ceil(vocab / 8)] uint8, in main memory"""

    def banned_tokens(self) -> list[int]:
        """The tokens that may not be chosen at this position."""
        params, output_len = self.params, self.position - self.prompt_len
        banned = list(params.stop_token_ids) if output_len < params.min_tokens else []
        banned += [word[-1] for word in params.bad_words if self._has_begun(word)]
        return banned

    def _has_begun(self, word: Sequence[int]) -> bool:
        """Whether the output ends with all tokens of the word but its last."""
        num_before = len(word) - 1
        if num_before > self.position - self.prompt_len:
            return False
        # of long words, one token tells most apart
        is_near = num_before == 0 or self.history[-1] == word[-2]
        return is_near and tuple(self.history[self.position - num_before :]) == word[:-1]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """The token that each row decides.

    Shapes: logits [num_rows, vocab], any float dtype. Equal scores go to the lowest token id. A
    row whose highest score is no finite number decides NO_TOKEN.
    """
    if _has_kernel(logits):
        return _sample_by_kernel(logits, rows, weight_of_probability=None)[0]
    # torch promises the first of equal maxima, on every device
    highest, tokens = perturbed_scores(logits, rows).max(dim=-1)
    chosen: list[int] = torch.where(highest.isfinite(), tokens, NO_TOKEN).tolist()
    return chosen


def sample_with_confidence(
    logits: Tensor, rows: Sequence[SamplingRow]
) -> tuple[list[int], list[float]]:
    """As `sample`, and how likely a target whose logits differ a little is to agree, in (0, 1].

    For a greedy row it is the token's probability. For a sampled one two things tell: the share in
    the softmax of the perturbed scores, which is how far ahead of all others the token was, and its
    probability before the noise was known, for where tokens were unlikely the models differ more.
    Of both it is the weighted geometric mean.
    """
    if _has_kernel(logits):
        return _sample_by_kernel(logits, rows, weight_of_probability=WEIGHT_OF_PROBABILITY)
    law = law_logits(logits, rows)
    scores = _perturb(law, rows)
    shares, tokens = scores.float().softmax(dim=-1).max(dim=-1)
    chosen = torch.where(shares.isfinite(), tokens, NO_TOKEN).tolist()
    if scores is law:
        return chosen, shares.tolist()
    probabilities = law.softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
    return chosen, [
        share ** (1.0 - WEIGHT_OF_PROBABILITY) * probability**WEIGHT_OF_PROBABILITY
        for share, probability in zip(shares.tolist(), probabilities.tolist(), strict=True)
    ]


def _has_kernel(logits: Tensor) -> bool:
    is_known = logits.device.type == "cpu" and logits.dtype in KERNEL_DTYPES
    return is_known and native.load_operators()


def _sample_by_kernel(
    logits: Tensor, rows: Sequence[SamplingRow], *, weight_of_probability: float | None
) -> tuple[list[int], list[float]]:
    """Tokens, and confidences if they have a weight."""
    temperatures = [row.params.temperature for row in rows]
    masks = [row.allowed for row in rows]
    if not all(row.params.is_only_scaled for row in rows):  # the law has all that in it
        logits = law_logits(logits, rows)
        temperatures = [float(temperature > 0.0) for temperature in temperatures]
        masks = [None] * len(rows)
    chosen: tuple[list[int], list[float]] = torch.ops.tandem.sample(
        logits,
        temperatures,
        [signed_64(row.seed) for row in rows],
        [row.position for row in rows],
        masks,
        weight_of_probability,
    )
    return chosen


def perturbed_scores(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The scores of which each row takes the highest: its law's logits, and noise if sampled.

    Rows that leave the logits as they are cost nothing.  # [num_rows, vocab]
    """
    return _perturb(law_logits(logits, rows), rows)


def law_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """`process_logits` of those rows that change them: all that are sampled.

    A sampled row's token has the law softmax of its row.  # [num_rows, vocab]
    """
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} rows"
    changed = [index for index, row in enumerate(rows) if not row.params.is_plain]
    if not changed:
        return logits
    if len(changed) == len(rows):
        return process_logits(logits, rows)
    law = logits.to(torch.float32, copy=True)
    changed_index = torch.tensor(changed, device=logits.device)
    law[changed_index] = process_logits(logits[changed_index], [rows[index] for index in changed])
    return law


def _perturb(law: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scores of all rows, with noise on those that are sampled.  # [num_rows, vocab]"""
    noisy = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if not noisy:
        return law
    noise = gumbel_noise(
        [rows[index].seed for index in noisy],
        [rows[index].position for index in noisy],
        vocab_size=law.shape[-1],
        device=law.device,
    )
    if len(noisy) == len(rows):  # the common case, without an index
        return law + noise
    return law.index_add(0, torch.tensor(noisy, device=law.device), noise)


def process_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits of the law to sample from, -inf where a token is cut off.  # [num_rows, vocab] fp32

    Greedy rows are not truncated or scaled: neither moves the maximum.
    """
    scores = logits.to(torch.float32, copy=True)
    _forbid(scores, rows)
    for index, row in enumerate(rows):
        if row.params.logit_bias:
            _add_logit_bias(scores[index], row.params)
        if row.params.has_penalties:
            _subtract_penalties(scores[index], row)
        if row.params.has_bans:
            _ban(scores[index], row.banned_tokens())
    sampled = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if not sampled:
        return scores
    all_sampled = len(sampled) == len(rows)
    selected = scores if all_sampled else scores[sampled]
    scale_and_truncate(selected, [rows[index].params for index in sampled])
    if not all_sampled:
        scores[torch.tensor(sampled, device=scores.device)] = selected
    return scores


def _forbid(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Rule out what grammars do not allow, in place.  # [num_rows, vocab]"""
    index = [i for i, row in enumerate(rows) if row.allowed is not None]
    if not index:
        return
    masks = torch.stack([row.allowed for row in rows if row.allowed is not None])
    eights = masks.flatten().to(scores.device, torch.int32)  # of tokens, one bit each
    biases = BIASES_OF_BYTE.to(scores.device).index_select(0, eights)
    biases = biases.view(len(index), -1)[:, : scores.shape[-1]]
    if len(index) == len(rows):
        scores += biases
    else:
        scores.index_add_(0, torch.tensor(index, device=scores.device), biases)


def _add_logit_bias(scores: Tensor, params: SamplingParams) -> None:
    """Add the biases of one row, in place.  # [vocab]"""
    tokens, biases = _tensors_of(params.logit_bias, scores.shape[0], scores.device)
    scores[tokens] += biases


@functools.lru_cache(maxsize=64)  # a sequence has many rows, and its biases may be thousands
def _tensors_of(
    logit_bias: tuple[tuple[int, float], ...], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The tokens of the vocabulary that have biases, and those.  # [num_biases] each"""
    in_vocab = [(token, bias) for token, bias in logit_bias if token < vocab_size]
    tokens = torch.tensor([token for token, _ in in_vocab], dtype=torch.long, device=device)
    return tokens, torch.tensor([bias for _, bias in in_vocab], device=device)


def _ban(scores: Tensor, tokens: Sequence[int]) -> None:
    """Rule tokens out in one row, in place.  # [vocab]"""
    in_vocab = [token for token in tokens if token < scores.shape[0]]
    scores[torch.tensor(in_vocab, dtype=torch.long, device=scores.device)] = float("-inf")


def _subtract_penalties(scores: Tensor, row: SamplingRow) -> None:
    """Apply the penalties of one row, in place.  # [vocab]"""
    params = row.params

    def counted(tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Indices of scores, and how often each comes; a draft may have fewer than its target."""
        counts = {token: n for token, n in Counter(tokens).items() if token < scores.shape[0]}
        index = torch.tensor(list(counts), dtype=torch.long, device=scores.device)
        return index, torch.tensor(list(counts.values()), device=scores.device)

    if params.repetition_penalty != 1.0:
        seen, _ = counted(row.history)
        before, penalty = scores[seen], params.repetition_penalty
        scores[seen] = torch.where(before > 0, before / penalty, before * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        tokens, counts = counted(row.history[row.prompt_len :])
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * counts


def gumbel_noise(
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard Gumbel noise, keyed by (seed, position, token id).  # [num_rows, vocab] fp32"""
    uniform = uniform_noise(row_keys(seeds, positions, device), vocab_size)
    return -((-uniform.log()).log()).to(torch.float32)


def row_keys(
    seeds: Sequence[int], positions: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Two 32-bit keys per row, from which its noise is made.  # [num_rows, 2]"""
    keys = [_row_keys(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def uniform_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Uniform numbers inside (0, 1), the same in every process and device.

    32 random bits each; fp64 keeps the tails, where the argmax is decided, exact.
    # [num_rows, 2] -> [num_rows, vocab] fp64
    """
    token_ids = torch.arange(vocab_size, dtype=torch.int64, device=keys.device)
    bits = _mix_32(_mix_32((token_ids ^ keys[:, :1]) & _MASK_32) ^ keys[:, 1:])
    return (bits.to(torch.float64) + 0.5) * 2.0**-32


def _mix_32(bits: Tensor) -> Tensor:
    """A bijection of 32-bit words with near-ideal avalanche (Wellons' lowbias32), in int64.

    The products wrap at 64 bits, which leaves their low 32 bits right.
    """
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _MASK_32
    bits = bits ^ (bits >> 15)
    bits = (bits * 0x846CA68B) & _MASK_32
    return bits ^ (bits >> 16)


def _row_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of (seed, position): SplitMix64 of both, in Python's exact integers."""
    state = split_mix_64(split_mix_64(seed) ^ position)
    return state & _MASK_32, state >> 32


def split_mix_64(state: int) -> int:
    """64 bits that look random beside those of any other state, of which the low 64 bits count."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)
