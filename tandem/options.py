"""Options on the command line: `name=value`, as `serve run` takes them."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from cluster.foreign_options import ADVICE, NAMES
from cluster.option_errors import nearest
from cluster.options import Switch
from deployments.args import AppArgs
from workers.errors import ConfigError

HELP_WORDS = frozenset({"--help", "-h", "help"})
WIDTH = 100
USAGE = """usage: tandem serve [name=value ...]

Serves a model on this machine until Ctrl-C, by HTTP (OpenAI's completions) and gRPC. Without
options it is the bundled demo pair. An example:

  tandem serve target=meta-llama/Llama-3.1-8B draft=meta-llama/Llama-3.2-1B http_port=8080

Options and their defaults:"""


def wants_help(words: Iterable[str]) -> bool:
    """Whether the words of a command line ask what they may be."""
    return not HELP_WORDS.isdisjoint(words)


def parse_words(words: Sequence[str]) -> dict[str, str]:
    """The options' names and values; raises ConfigError for a word that is no option."""
    values: dict[str, str] = {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if not word.isprintable():
            raise ConfigError(
                f"{word!a} has characters that cannot be printed; write it without them"
            )
        name, equals, value = word.removeprefix("--").partition("=")
        if not (name and equals and value):
            hint = f"; if it is a model, write target={word}" if "/" in word else ""
            if word.startswith("--") and not equals:
                hint = f"; {_advice(name.replace('-', '_'), following)}"
            elif equals and name:
                hint = f"; {name} has no value: leave it out for its default"
            raise ConfigError(
                f"{word!r} is no option: they are written name=value, like gamma=2; "
                f"`tandem serve --help` lists them{hint}"
            )
        name = name.replace("-", "_")
        if name in values:
            raise ConfigError(f"{name} is given twice: {values[name]!r} and {value!r}; drop one")
        values[name] = value
    return values


def _advice(name: str, following: str) -> str:
    """How an option is written that was given as `--name`, perhaps with its value behind it."""
    fields = AppArgs.model_fields
    if name in ADVICE:
        return ADVICE[name]
    known = nearest(name, fields, elsewhere=NAMES) or name
    is_value = following and not following.startswith("--") and "=" not in following
    is_switch = known in fields and fields[known].annotation in (bool, Switch)
    otherwise = "on" if is_switch else "<its value>"
    return f"write {known}={following if is_value else otherwise}"


def options_help() -> str:
    """Every option with its default, and what it means."""
    entries = []
    for name, field in AppArgs.model_fields.items():
        default = "" if field.default is None else str(field.default)
        meaning = " ".join((field.description or "").split())
        entries.append(f"  {name}={default}")
        entries += textwrap.wrap(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join([USAGE, "", *entries])
