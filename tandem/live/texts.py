"""Prompts of several kinds: what speculation gains depends on the text."""

import itertools
import random
import re
import string

from tandem.demo.corpus import Corpus, held_out_prompts

KINDS = ("easy", "hard", "copy", "repeat")
NUM_CHARACTERS = 400
NUM_REPEATED = 4
"""Requests of `repeat` that have one template."""
EDIT_EVERY = 12
"""How many words of a text there are for each that is edited."""


def make_prompts(kind: str, num_prompts: int, *, seed: int = 0) -> list[str]:
    """Distinct prompts of about NUM_CHARACTERS.

    `easy`: code as both models were trained on, from files they have not seen. `hard`: random
    characters, on which drafts are hardly ever right. `copy`: code that is repeated, as when a
    model edits a file. `repeat`: the same code behind numbers that differ, as when an agent asks by
    a template, so that completions resemble earlier ones.
    """
    if kind == "hard":
        rng = random.Random(seed)
        characters = string.ascii_letters + string.digits + string.punctuation + " \n"
        return ["".join(rng.choices(characters, k=NUM_CHARACTERS)) for _ in range(num_prompts)]
    prompts = held_out_prompts(Corpus.load(), num_prompts, seed=seed)
    if kind == "copy":
        return [prompt[: NUM_CHARACTERS // 2] * 2 for prompt in prompts]
    if kind == "repeat":
        templates = prompts[: -(-num_prompts // NUM_REPEATED)]
        return [
            f"# task {index:04}\n{templates[index % len(templates)]}"[:NUM_CHARACTERS]
            for index in range(num_prompts)
        ]
    assert kind == "easy", f"there are no {kind} prompts"
    return prompts


def edited(text: str, *, seed: int = 0) -> str:
    """A text with small edits: of about EDIT_EVERY words one is changed, left out or doubled."""
    rng = random.Random(seed)

    def edit(word: re.Match[str]) -> str:
        if rng.random() * EDIT_EVERY >= 1:
            return word[0]
        return rng.choice(["other", "", f"{word[0]} {word[0]}"])

    return re.sub(r"\w+", edit, text)


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
