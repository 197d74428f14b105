"""What the benchmarks of a served model have in common: which server, and what it is asked."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster import bundled
from tandem.bench.client import Endpoint, Load, run_closed
from tandem.bench.remote import RemoteOptions, find_server
from tandem.bench.report import environment, shown_options
from tandem.bench.rows import DYNAMIC, Gamma, Sample, Setting
from tandem.demo.grow import grown_target

MODEL_NAME = "bench"
DYNAMIC_MAX = 16
"""What a dynamic gamma may go up to: the app's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOptions:
    """Every benchmark of a served model is asked for these."""

    remote: RemoteOptions | None
    """None starts an app of our own."""
    target: str | None
    """None grows the bundled target to 287M parameters."""
    draft: str | None
    """None takes the bundled one."""
    gammas: tuple[Gamma, ...]
    max_tokens: int
    seed: int
    """Of prompts and arrivals."""
    with_compile: bool
    output: Path


class Server(Protocol):
    """What is measured."""

    @property
    def endpoint(self) -> Endpoint: ...

    def set_gamma(self, gamma: Gamma) -> None: ...

    def take_statistics(self) -> Any:
        """The router's RoundStatistics since the last call; None of a server that is not ours."""
        ...

    def wait_until_idle(self) -> None:
        """Until no completion runs: those whose clients hung up end a little later."""
        ...


@contextmanager
def measured_server(options: ServedOptions) -> Iterator[Server]:
    """The server that --url names, or an app of our own until the block ends."""
    options.output.mkdir(parents=True, exist_ok=True)
    if options.remote is not None:
        yield find_server(options.remote)
        return
    from tandem.bench.server import live_server  # Ray is not needed for another's server

    with live_server(app_options(options), options.output / "server.log") as server:
        yield server


def target_name(options: ServedOptions) -> str | None:
    """None where another's server is measured, and what it serves is not told."""
    if options.target or options.remote is not None:
        return options.target
    return grown_target(options.output)


def app_options(options: ServedOptions) -> dict[str, str]:
    """Of our own app: gammas are changed while it runs."""
    most_drafts = max(DYNAMIC_MAX if g == DYNAMIC else int(g) for g in (*options.gammas, 1))
    return {
        "target": str(target_name(options)),
        "draft": options.draft or bundled.DRAFT_NAME,
        "served_model_name": MODEL_NAME,
        "num_speculative_tokens": str(most_drafts),
        "gamma": "0",
        "compile": "auto" if options.with_compile else "off",
    }


def measure(server: Server, setting: Setting, prompts: Sequence[str], max_tokens: int) -> Sample:
    """Complete all prompts, so many at a time as the setting says."""
    server.set_gamma(setting.gamma)
    server.take_statistics()
    load = Load(prompts=prompts, max_tokens=max_tokens, temperature=setting.temperature)
    result = asyncio.run(run_closed(server.endpoint, load, concurrency=setting.concurrency))
    statistics = server.take_statistics()
    server.wait_until_idle()
    return Sample(load=result, statistics=statistics)


def header(options: ServedOptions, server: Server) -> dict[str, Any]:
    """What every report of a served model says about how it was made."""
    return {
        **environment(),
        "endpoint": asdict(server.endpoint),
        "options": shown_options(asdict(options), target=target_name(options)),
        "seeds": {
            "prompts": options.seed,
            "arrivals": options.seed,
            "sampling": "request i of a load has the seed i",
        },
    }
