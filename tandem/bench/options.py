"""The options that benchmarks share, and how a dataclass of options becomes a command line."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from cluster import bundled
from tandem.arguments import above_zero, gamma, temperature, whole
from tandem.live.texts import KINDS

T = TypeVar("T")


def option(default: T, help: str, **described: Any) -> T:
    """A field of a dataclass of options; `described` is what argparse is told beside the help."""
    value: T = field(default=default, metadata={"help": help, **described})
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options that every benchmark has."""

    target: str | None = option(
        None, "a folder or an id (default: the bundled target grown to 287M parameters)"
    )
    draft: str = option(bundled.DRAFT_NAME, "a folder or an id")
    compile: bool = option(True, "measure compiled forwards, once they are there")
    output: Path = option(Path("docs/results"), "folder for the results", type=Path)
    work: Path = option(Path("bench-results"), "folder for logs and the grown target", type=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions(ModelOptions):
    """The options that every benchmark of a live app has."""

    draft_gpu_share: float = option(
        1.0, "part of a GPU that the draft takes, below 1 beside the target", type=above_zero
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(AppOptions):
    """The options of benchmarks that load a live app in several ways."""

    texts: tuple[str, ...] = option(("easy",), "kinds of prompts", choices=KINDS)
    temperatures: tuple[float, ...] = option((0.0,), "0 is greedy", type=temperature)
    gammas: tuple[int | str, ...] = option(
        (0, 4, "dynamic"), "draft lengths to compare: numbers, or dynamic", type=gamma
    )
    concurrencies: tuple[int, ...] = option((1,), "streams at a time", type=whole)
    max_tokens: int = option(128, "tokens of a completion", type=whole)
    repeats: int = option(3, "how often all is measured; medians count", type=whole)
    seed: int = option(0, "the seed of the prompts", type=int)


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add an argument for each field of a dataclass of options."""
    for each in fields(options):
        described: dict[str, Any] = {**each.metadata, "default": each.default}
        if isinstance(each.default, bool):
            described["action"] = argparse.BooleanOptionalAction
        elif isinstance(each.default, tuple):
            described["nargs"] = "+"
        if each.default is not None:
            described["help"] += f" (default: {_shown(each.default)})"
        parser.add_argument(f"--{each.name.replace('_', '-')}", **described)


def make_options(options: type[T], parsed: argparse.Namespace) -> T:
    """The dataclass of options that a command line asks for."""
    return options(**dict(_values(options, parsed)))


def command_of(command: str, options: Any) -> str:
    """The command line that asks for a command like `bench app` with these options, defaults left
    out."""
    words = ["tandem", command]
    for each in fields(options):
        value = getattr(options, each.name)
        flag = each.name.replace("_", "-")
        if each.name in ("output", "work") or value == each.default:
            continue
        words.append(f"--no-{flag}" if value is False else f"--{flag} {_shown(value)}")
    return " ".join(words)


def _values(options: type[Any], parsed: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for each in fields(options):
        value = getattr(parsed, each.name)
        yield each.name, tuple(value) if isinstance(value, list) else value


def _shown(value: object) -> str:
    """A value as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
