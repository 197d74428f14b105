"""What the values of options on a command line may be; each raises argparse's error for others."""

import argparse

from cluster.drafters import read_drafters

MOST_DRAFTS = 64
"""The most that the app's num_speculative_tokens may be."""


def whole(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def temperature(text: str) -> float:
    """A number from 0 to 2."""
    value = _number(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 2")
    return value


def gamma(text: str) -> int | str:
    """A draft length, or `dynamic`."""
    if text == "dynamic":
        return text
    if not text.isdecimal() or int(text) > MOST_DRAFTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number from 0 to {MOST_DRAFTS} nor dynamic"
        )
    return int(text)


def drafters(text: str) -> str:
    """What the app's option `drafter` may be."""
    try:
        return read_drafters(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")  # which no range holds
