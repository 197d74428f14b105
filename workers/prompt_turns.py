"""Whose prompts are run next, where those of several keys wait. Pure.

Start-time fair queueing (Goyal, Vin, Cheng 1996): a key's turn begins at its tag S, and the lowest
tag is next. The turn lasts for a prompt, or for a part of a long one; then S grows by the tokens
that were run, over the key's weight. A key that had no prompts waiting begins at the lowest tag of
those that had, unless its own is higher still, and goes before those of the same tag. So the prompt
of a key that asks for little is run before what waits of a key that floods, and no key gets more
than its share of the tokens by asking again.

Prompts of one key are run in the order of their arrival.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Prompt(Protocol):
    """What waits: a prompt, or the rest of one."""

    @property
    def tenant(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def num_tokens(self) -> int: ...


PromptT = TypeVar("PromptT", bound=Prompt)


@dataclass(slots=True)
class _Key:
    tag: float
    number: int
    """How many keys had come, or come again, before it did."""
    used: float = 0.0
    """Tokens over its weight that were run in its turn, which are not in its tag yet."""

    def end_turn(self) -> None:
        self.tag += self.used
        self.used = 0.0


class PromptTurns:
    """The turns of the keys that have prompts waiting."""

    def __init__(self, turn_len: int) -> None:
        """A turn ends with the prompt, or once `turn_len` tokens are run of a longer one."""
        self._turn_len = turn_len
        self._keys: dict[str, _Key] = {}
        """Keys with prompts that wait, and others while they are ahead of those."""
        self._waiting: set[str] = set()
        self._lowest_tag = 0.0
        """The lowest tag of a key that waited; it never falls."""
        self._num_comings = 0

    def in_turn(self, prompts: Iterable[PromptT]) -> list[PromptT]:
        """The prompts, which come in the order of their arrival, as they are to be run."""
        waiting: dict[str, deque[PromptT]] = {}
        for prompt in prompts:
            waiting.setdefault(prompt.tenant, deque()).append(prompt)
        self._admit(waiting.keys())
        turns = [(self._keys[name].tag, -self._keys[name].number, name) for name in waiting]
        heapq.heapify(turns)
        in_turn = []
        while turns:
            tag, newest_first, name = heapq.heappop(turns)
            prompt = waiting[name].popleft()
            in_turn.append(prompt)
            if waiting[name]:
                later = tag + prompt.num_tokens / prompt.weight
                heapq.heappush(turns, (later, newest_first, name))
        return in_turn

    def ran(self, prompt: Prompt, num_tokens: int) -> None:
        """Charge the prompt's key with so many tokens of it that are run."""
        key = self._keys[prompt.tenant]
        key.used += num_tokens / prompt.weight
        if num_tokens == prompt.num_tokens or key.used >= self._turn_len / prompt.weight:
            key.end_turn()

    def _admit(self, waiting: Collection[str]) -> None:
        """Bring the tags up to date: of keys that come, that go and that are forgotten."""
        tags = [self._keys[name].tag for name in self._waiting.intersection(waiting)]
        self._lowest_tag = max(self._lowest_tag, min(tags, default=0.0))
        for name in self._waiting.difference(waiting):
            self._keys[name].end_turn()
        for name in waiting:
            if name not in self._waiting:
                self._come(name)
        self._waiting = set(waiting)
        for name in self._keys.keys() - self._waiting:
            if self._keys[name].tag <= self._lowest_tag:
                del self._keys[name]

    def _come(self, name: str) -> None:
        self._num_comings += 1
        before = self._keys.get(name)
        tag = self._lowest_tag if before is None else max(before.tag, self._lowest_tag)
        self._keys[name] = _Key(tag=tag, number=self._num_comings)
