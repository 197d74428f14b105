"""Draft models with another tokenizer: how their tests make and ask them."""

from collections.abc import Sequence
from functools import cache

from tests.tokenizers import TEXTS, wrapped
from tests.workers.decoding import CACHE, GREEDY
from workers.drafters.model import ModelDrafter
from workers.drafters.translated import TranslatedDrafter, make_drafter
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.types import HeterogeneousVocab, ProposeRequest, ProposeResult
from workers.vocabulary import compare_vocabularies

PERMUTED = ("byte level", "letters")
METHODS: tuple[HeterogeneousVocab, ...] = ("intersection", "retokenize")
compare = cache(compare_vocabularies)


@cache
def load(name: str) -> Model:
    """A model, loaded once; nobody changes it."""
    return load_model(name, dtype="float32", device="cpu")


def drafter_of(
    names: dict[str, str],
    target: str,
    draft: str,
    method: HeterogeneousVocab,
    cache: CacheOptions = CACHE,
    *,
    model: Model | None = None,
) -> TranslatedDrafter:
    """A new drafter, of a draft model that may be loaded already."""
    vocabulary = compare(names[target], names[draft], method)
    drafter = make_drafter(
        model or load(names[draft]),
        vocabulary,
        cache,
        target=names[target],
        max_batched_tokens=32,
    )
    assert isinstance(drafter, TranslatedDrafter)
    return drafter


def request(
    tokens: Sequence[int],
    *,
    base_len: int = 0,
    k: int = 6,
    sampling: SamplingParams = GREEDY,
    assumed: Sequence[int] = (),
    prompt_len: int = 5,
) -> ProposeRequest:
    return ProposeRequest(
        seq_id="s",
        base_len=base_len,
        new_tokens=tuple(tokens[base_len:]),
        assumed_tokens=tuple(assumed),
        k=k,
        prompt_len=prompt_len,
        sampling=sampling,
        seed=1,
    )


def propose(drafter: ModelDrafter, asked: ProposeRequest) -> ProposeResult:
    (result,) = drafter.propose([asked])
    drafter.check_integrity()
    return result


def encode(kind: str, text: str = TEXTS[0]) -> list[int]:
    return wrapped(kind).encode(text, add_special_tokens=False)
