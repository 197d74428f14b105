"""Whose prompts are run next: shares by weight, whatever keys ask for and when."""

import random
from collections import Counter
from dataclasses import dataclass

from workers.prompt_turns import PromptTurns

TURN_LEN = 100


@dataclass(eq=False)
class Waiting:
    tenant: str
    num_tokens: int
    weight: float = 1.0


def first(turns: PromptTurns, waiting: list[Waiting]) -> Waiting:
    """Run the first in turn to its end."""
    prompt = turns.in_turn(waiting)[0]
    turns.ran(prompt, prompt.num_tokens)
    waiting.remove(prompt)
    return prompt


def test_prompts_of_one_key_are_run_as_they_came() -> None:
    prompts = [Waiting("a", num_tokens) for num_tokens in (50, 1, 20)]
    assert PromptTurns(TURN_LEN).in_turn(prompts) == prompts


def test_a_key_that_had_nothing_waiting_is_next() -> None:
    turns = PromptTurns(TURN_LEN)
    waiting = [Waiting("flood", 100) for _ in range(10)]
    for _ in range(5):
        first(turns, waiting)
        quiet = Waiting("quiet", 100)
        waiting.append(quiet)
        assert first(turns, waiting) is quiet


def test_asking_again_at_once_brings_no_more_than_a_share() -> None:
    turns = PromptTurns(TURN_LEN)
    flood = [Waiting("flood", 100) for _ in range(100)]
    ran: Counter[str] = Counter()
    waiting = [*flood, Waiting("eager", 1000)]
    for _ in range(60):
        prompt = first(turns, waiting)
        ran[prompt.tenant] += prompt.num_tokens
        if prompt.tenant == "eager":
            waiting.append(Waiting("eager", 1000))
    assert ran["eager"] <= ran["flood"] + 1000


def test_long_prompts_are_cut_by_the_turns_of_others() -> None:
    turns = PromptTurns(TURN_LEN)
    long, short = Waiting("long", 10_000), [Waiting("short", 100) for _ in range(3)]
    served = []
    while short:
        prompt = turns.in_turn([long, *short])[0]
        served.append(prompt.tenant)
        turns.ran(prompt, 50)
        prompt.num_tokens -= 50
        short = [each for each in short if each.num_tokens]
    assert served == ["short", "short", "long", "long"] * 2 + ["short", "short"]


def test_what_was_run_counts_of_a_prompt_that_is_given_up() -> None:
    turns = PromptTurns(TURN_LEN)
    flood = [Waiting("flood", 50) for _ in range(10)]
    assert turns.in_turn(flood)
    turns.ran(flood.pop(0), 50)
    given_up = Waiting("leaves", 90)
    assert turns.in_turn([*flood, given_up])[0] is given_up
    turns.ran(given_up, 60)
    assert turns.in_turn(flood)
    order = turns.in_turn([*flood, Waiting("leaves", 90)])
    assert [prompt.tenant for prompt in order[:3]] == ["flood", "flood", "leaves"]


def test_tokens_are_shared_by_weight_over_any_prompts() -> None:
    rng = random.Random(5)
    turns = PromptTurns(TURN_LEN)
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    waiting = [
        Waiting(tenant, rng.randint(1, 300), weight)
        for tenant, weight in weights.items()
        for _ in range(400)
    ]
    ran: Counter[str] = Counter()
    while len({prompt.tenant for prompt in waiting}) == 3:
        prompt = first(turns, waiting)
        ran[prompt.tenant] += prompt.num_tokens
    per_weight = [ran[tenant] / weight for tenant, weight in weights.items()]
    assert max(per_weight) - min(per_weight) <= 2 * 300


def test_the_order_is_that_in_which_turns_would_come() -> None:
    turns = PromptTurns(TURN_LEN)
    prompts = [Waiting("a", 10), Waiting("a", 10), Waiting("b", 15), Waiting("b", 10)]
    order = [prompts.index(each) for each in turns.in_turn(prompts)]
    assert order == [2, 0, 1, 3]


def test_keys_are_forgotten_once_they_are_behind() -> None:
    turns = PromptTurns(TURN_LEN)
    for number in range(100):
        waiting = [Waiting("flood", 50), Waiting(f"key-{number}", 10)]
        first(turns, waiting)
        first(turns, waiting)
    assert len(turns._keys) <= 3
