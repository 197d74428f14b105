"""The prompts of benchmarks."""

import pytest

from tandem.live.texts import KINDS, edited, make_long_text, make_prompts


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_distinct_and_seeded(kind: str) -> None:
    prompts = make_prompts(kind, 8)
    assert len(set(prompts)) == 8
    assert prompts == make_prompts(kind, 8)
    assert all(200 <= len(prompt) <= 400 for prompt in prompts)


def test_repeated_prompts_are_a_template_with_a_number() -> None:
    prompts = [prompt.partition("\n") for prompt in make_prompts("repeat", 8)]
    assert len({number for number, _, _ in prompts}) == 8
    assert len({template for _, _, template in prompts}) == 2


def test_an_edited_text_is_mostly_the_same() -> None:
    text = " ".join(f"word{index}" for index in range(600))
    changed = edited(text)
    assert changed == edited(text) != edited(text, seed=1)
    kept = {*text.split()} & {*changed.split()}
    assert 0.88 < len(kept) / 600 < 0.98
    assert "other" in changed


def test_long_texts_are_seeded_and_of_any_length() -> None:
    text = make_long_text(2_000_000, seed=1)  # more than all held-out files have
    assert len(text) == 2_000_000
    assert make_long_text(5000, seed=1) == text[:5000]
    assert make_long_text(5000, seed=2) != text[:5000]
