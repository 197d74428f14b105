"""`tandem bench app`: draft lengths in turn on one live app."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from tqdm import tqdm

from cluster import bundled
from cluster.drafters import DRAFTERS
from tandem.arguments import drafters, whole
from tandem.bench.options import AppOptions, LoadOptions, ModelOptions, command_of, option
from tandem.bench.report import markdown_table, write_result
from tandem.bench.rows import AUTO, COLUMNS, DYNAMIC, Row, Sample, Setting, make_rows, make_settings
from tandem.live.client import Load, LoadResult
from tandem.live.texts import KINDS, edited, make_prompts
from workers.errors import ConfigError
from workers.types import HeterogeneousVocab

if TYPE_CHECKING:
    from tandem.live.server import LiveServer

MODEL_NAME = "bench"
PREDICTED = "predicted"
"""The mode that drafts from what a client predicts."""
EDIT = "edit"
"""Easy text, of which clients predict what they get with small edits."""
DYNAMIC_MAX = 16
"""The longest draft of a dynamic gamma: the app's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(LoadOptions):
    """Every combination of text, temperature, streams, mode and gamma is a setting."""

    drafter: str = option("model", "the drafters of the app, like suffix,model", type=drafters)
    early_exit_layer: int | None = option(
        None, "with --drafter early_exit, how many first layers draft", type=whole
    )
    heterogeneous_vocab: HeterogeneousVocab = option(
        "auto", "how a draft with another tokenizer drafts", choices=get_args(HeterogeneousVocab)
    )
    texts: tuple[str, ...] = option(("easy",), "kinds of prompts", choices=(*KINDS, EDIT))
    modes: tuple[str, ...] = option(
        (AUTO,), "who drafts, of those that the app has", choices=(AUTO, *DRAFTERS, PREDICTED)
    )
    num_prompts: int = option(8, "prompts of each load", type=whole)


def run(options: Options) -> str:
    """Measure all settings, taking turns; returns the table.

    Results are written after every repeat, so an interruption loses only the one that runs.
    """
    if (most := max(options.concurrencies)) > options.num_prompts:
        raise ConfigError(
            f"--concurrencies has {most}, but with --num-prompts {options.num_prompts} only that "
            f"many streams would run; give at least --num-prompts {most}"
        )
    table = ""
    with measured_app(
        options,
        options.gammas,
        drafter=options.drafter,
        early_exit_layer=options.early_exit_layer,
        heterogeneous_vocab=options.heterogeneous_vocab,
    ) as server:
        for rows in _repeats(options, server):
            table = markdown_table(COLUMNS, rows)
            figures = {"options": options, "rows": rows}
            write_result(options.output, command_of("bench app", options), table, figures)
    return table


def measured_app(
    options: AppOptions,
    gammas: Sequence[int | str],
    *,
    drafter: str = "model",
    early_exit_layer: int | None = None,
    heterogeneous_vocab: HeterogeneousVocab = "auto",
) -> "AbstractContextManager[LiveServer]":
    """A live app that starts with gamma 0, whose gamma may become any of these."""
    from tandem.live.server import live_server  # needs Ray, which other subjects do without

    most_drafts = max(DYNAMIC_MAX if g == DYNAMIC else int(g) for g in (*gammas, 1))
    app_options = {
        "target": target_folder(options),
        "drafter": drafter,
        "heterogeneous_vocab": heterogeneous_vocab,
        **(_draft_options(options) if "model" in drafter.split(",") else {}),
        **({} if early_exit_layer is None else {"early_exit_layer": str(early_exit_layer)}),
        "served_model_name": MODEL_NAME,
        "num_speculative_tokens": str(most_drafts),
        "gamma": "0",
        "compile": "auto" if options.compile else "off",
    }
    return live_server(app_options, options.work / "server.log")


def _draft_options(options: AppOptions) -> dict[str, str]:
    """What is said of a draft model: the options that an app without one refuses."""
    return {"draft": options.draft, "draft_gpu_share": str(options.draft_gpu_share)}


def target_folder(options: ModelOptions) -> str:
    """The target's folder or id; raises ConfigError if it has no config."""
    from tandem.demo.grow import grown_target  # `--help` comes without imports that take seconds
    from workers.model import load_config

    target = bundled.resolve(options.target or grown_target(options.work))
    load_config(target)
    return target


def complete(server: "LiveServer", setting: Setting, load: Load) -> LoadResult:
    """Complete a load, so many prompts at a time as the setting says; raises LoadError."""
    server.set_gamma(setting.gamma)
    return server.run(load, concurrency=setting.concurrency)


def _load(options: Options, setting: Setting, server: "LiveServer") -> Load:
    is_edit = setting.text == EDIT
    load = Load(
        prompts=make_prompts(
            "easy" if is_edit else setting.text, options.num_prompts, seed=options.seed
        ),
        max_tokens=options.max_tokens,
        temperature=setting.temperature,
    )
    if not is_edit:
        return load
    server.set_gamma(0)
    texts = server.run(load, concurrency=1).texts
    return replace(load, predictions=[edited(text, seed=index) for index, text in enumerate(texts)])


def _repeats(options: Options, server: "LiveServer") -> Iterator[list[Row]]:
    """Measure everything once per repeat; yields the rows of all repeats until then."""
    settings = [
        setting
        for setting in make_settings(options, options.modes)
        if setting.text == EDIT or setting.mode != PREDICTED
    ]
    # settings of one text and temperature have the same requests
    of_kind = {(each.text, each.temperature): each for each in settings}
    load_of = {kind: _load(options, each, server) for kind, each in of_kind.items()}
    loads = {
        each: replace(load_of[each.text, each.temperature], mode=each.mode) for each in settings
    }
    samples: dict[Setting, list[Sample]] = {setting: [] for setting in loads}
    for setting, load in loads.items():  # the first of everything is slower
        few = replace(setting, concurrency=min(2, setting.concurrency))
        complete(server, few, replace(load.again(), prompts=load.prompts[:2]))
    counters = server.counters()
    progress = tqdm(total=len(loads) * options.repeats, desc="app")
    for _ in range(options.repeats):
        for setting, load in loads.items():
            result = complete(server, setting, load.again())
            before, counters = counters, server.counters()
            samples[setting].append(Sample(load=result, counters=counters.since(before)))
            progress.update()
        yield make_rows(samples)
    progress.close()
