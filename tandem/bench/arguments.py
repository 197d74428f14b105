"""Every option of `tandem bench`: what its value may be, and what goes together."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.bench.texts import KINDS
from workers.errors import ConfigError

if TYPE_CHECKING:
    from tandem.bench.remote import RemoteOptions

MOST_DRAFTS = 64
"""As many as the app's num_speculative_tokens allows."""


def whole(text: str) -> int:
    """A number of something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """A rate, or seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 2")
    return value


def gamma(text: str) -> int | str:
    if text == "dynamic":
        return text
    if not text.isdecimal() or int(text) > MOST_DRAFTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number from 0 to {MOST_DRAFTS} nor dynamic"
        )
    return int(text)


OPTIONS: dict[str, dict[str, Any]] = {
    "--target": {"help": "by default the bundled target grown to 287M parameters"},
    "--draft": {"help": "by default the bundled draft"},
    "--gammas": {
        "type": gamma,
        "nargs": "+",
        "help": "draft lengths to compare: numbers, or dynamic (default: 0 4 dynamic)",
    },
    "--concurrencies": {"type": whole, "nargs": "+", "help": "streams at a time"},
    "--rates": {"type": above_zero, "nargs": "+", "help": "requests per second"},
    "--num-prompts": {"type": whole, "help": "of each load"},
    "--max-tokens": {"type": whole, "help": "of a completion"},
    "--texts": {"nargs": "+", "choices": KINDS, "help": "kinds of prompts"},
    "--temperatures": {"type": temperature, "nargs": "+", "help": "0 is greedy"},
    "--seed": {"type": int, "help": "of prompts and arrivals"},
    "--repeats": {"type": whole, "help": "of which the median counts"},
    "--num-threads": {"type": whole, "help": "of the CPU"},
    "--long-tokens": {
        "type": whole,
        "help": "of the long prompt (default: all the context has room for)",
    },
    "--alone-s": {"type": above_zero, "help": "seconds the streams run before it comes"},
    "--baselines": {
        "action": argparse.BooleanOptionalAction,
        "help": "measure transformers in the same run (default: yes; with --url, if --target "
        "names the same model)",
    },
    "--compile": {
        "action": argparse.BooleanOptionalAction,
        "help": "measure compiled forwards, once they are there (default: yes)",
    },
    "--url": {
        "help": "measure this server of OpenAI's completions, and start none; it drafts as it is "
        "served, and every load's prompts begin with a line of their own, since it may cache them"
    },
    "--model": {"help": "with --url: its name there (default: the first it lists)"},
    "--ignore-eos": {
        "action": argparse.BooleanOptionalAction,
        "help": "with --url: ask for --max-tokens whatever the model says, by a field that not "
        "every server knows (default: yes); without it completions end where the model ends them",
    },
    "--output": {"type": Path, "help": "folder to write to"},
    "reports": {"type": Path, "nargs": "*", "help": "the two to compare"},
}
"""For argparse; defaults are each subject's own."""


def remote_options(
    options: argparse.Namespace, *, others: tuple[str, ...]
) -> "RemoteOptions | None":
    """The server that --url names, if one is; raises ConfigError for options that are not for it.

    `others`: those that are for an app of our own.
    """
    from tandem.bench.remote import RemoteOptions  # needs httpx

    if options.url is None:
        _refuse(options, ("model", "ignore_eos"), "it is for --url; give that too, or drop it")
        return None
    why = f"the server at {options.url} stays as it was started; drop it, or --url"
    _refuse(options, others, why)
    return RemoteOptions(
        url=options.url, model=options.model, with_ignore_eos=options.ignore_eos is not False
    )


def with_baselines(options: argparse.Namespace) -> bool:
    """Beside another's server, transformers runs if it is said what; raises ConfigError."""
    if options.url is None or options.target is not None:
        return options.baselines is not False
    why = "without --target there is no model for transformers; name what --url serves, or drop it"
    _refuse(options, ("baselines", "draft"), why, unless=False)
    return False


def _refuse(
    options: argparse.Namespace, names: tuple[str, ...], why: str, *, unless: object = None
) -> None:
    for name in names:
        value = getattr(options, name)
        if value is None or value is unless:
            continue
        option = name.replace("_", "-")
        given = f"--no-{option}" if value is False else f"--{option}"
        if not isinstance(value, bool):
            given += f" {shown(value)}"
        raise ConfigError(f"{given} cannot be used here: {why}")


def shown(value: object) -> str:
    """As on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
