"""A server that somebody else runs, measured from outside: `--url`."""

from dataclasses import dataclass
from typing import Any

import httpx

from tandem.bench.client import MAX_SHOWN_ERROR, Endpoint
from workers.errors import ConfigError

FIND_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    url: str
    model: str | None
    """None takes the first that the server lists."""
    with_ignore_eos: bool
    """Whether completions are asked to go on to max_tokens, which not every server knows."""


class RemoteServer:
    """Speaks OpenAI's completions; nothing more is known of it, and nothing can be changed."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def set_gamma(self, gamma: int | str) -> None:
        """It drafts as it was started to."""

    def take_statistics(self) -> None:
        """There are none."""

    def wait_until_idle(self) -> None:
        """It does not say when."""


def find_server(options: RemoteOptions) -> RemoteServer:
    """The server, and its model unless that is named; raises ConfigError."""
    url = _root(options.url)
    model = options.model or _first_model(url)
    endpoint = Endpoint(
        url=url, model=model, is_ours=False, with_ignore_eos=options.with_ignore_eos
    )
    return RemoteServer(endpoint)


def served_models(url: str) -> list[dict[str, Any]]:
    """What GET /v1/models lists; raises ConfigError."""
    try:
        response = httpx.get(f"{url}/v1/models", timeout=FIND_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"no server answers at {url} ({error}); start it, or give another --url, like "
            "http://127.0.0.1:8000"
        ) from error
    try:
        return [dict(model) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{url}/v1/models is no list of models (status {response.status_code}: "
            f"{response.text[:MAX_SHOWN_ERROR]}); name one with --model, or give the --url of a "
            "server of OpenAI's completions"
        ) from error


def _root(url: str) -> str:
    """Without the path that clients of OpenAI are told."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--url is {url!r}; it must be like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def _first_model(url: str) -> str:
    models = served_models(url)
    if not models:
        raise ConfigError(f"{url} lists no model; name one with --model")
    return str(models[0]["id"])
