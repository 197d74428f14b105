"""Random numbers beside the noise of the target's own samples.

Rules that draw on the target's law and on the drafter's are exact only if what draws a draft, what
accepts it and what replaces it know nothing of each other. So each has a stream of its own. It is
made of counters, as all noise is: a round that is tried again decides the same. A later round has
other numbers for the same position, since what became of a draft may depend on drafts behind it.
"""

from enum import IntEnum

from workers.sampling import split_mix_64


class Stream(IntEnum):
    """What random numbers are for; no two are related."""

    DRAFT = 1
    ACCEPTANCE = 2


def random_bits(seed: int, position: int, *, stream: Stream, round_len: int) -> int:
    """64 random bits for a position of the round that began with `round_len` committed tokens."""
    state = split_mix_64(split_mix_64(seed) ^ stream)
    return split_mix_64(split_mix_64(state ^ round_len) ^ position)


def uniform(seed: int, position: int, *, stream: Stream, round_len: int) -> float:
    """A random number from 0 to 1, less than 1."""
    return (random_bits(seed, position, stream=stream, round_len=round_len) >> 11) * 2.0**-53
