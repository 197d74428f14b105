"""Prompts of several kinds: what speculation gains depends on the text."""

import itertools
import random
import string

from tandem.demo.corpus import Corpus, held_out_prompts

KINDS = ("easy", "hard", "copy")
NUM_CHARACTERS = 400


def make_prompts(kind: str, num_prompts: int, *, seed: int = 0) -> list[str]:
    """Distinct prompts of about NUM_CHARACTERS.

    `easy`: code as both models were trained on, from files they have not seen. `hard`: random
    characters, on which drafts are hardly ever right. `copy`: code that is repeated, as when a
    model edits a file.
    """
    if kind == "hard":
        rng = random.Random(seed)
        characters = string.ascii_letters + string.digits + string.punctuation + " \n"
        return ["".join(rng.choices(characters, k=NUM_CHARACTERS)) for _ in range(num_prompts)]
    prompts = held_out_prompts(Corpus.load(), num_prompts, seed=seed)
    if kind == "copy":
        return [prompt[: NUM_CHARACTERS // 2] * 2 for prompt in prompts]
    assert kind == "easy", f"there are no {kind} prompts"
    return prompts


def make_long_text(num_characters: int, *, seed: int = 0) -> str:
    """Held-out files one after the other, in a seeded order, and again where they run out."""
    documents = list(Corpus.load().held_out)
    random.Random(seed).shuffle(documents)
    text = ""
    for document in itertools.cycle(documents):
        text += document.text[: num_characters - len(text)]
        if len(text) == num_characters:
            return text
    raise AssertionError("there are no held-out files")
