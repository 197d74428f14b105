"""The app that is put under a load, and the options that say what it is."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from cluster import bundled
from tandem.bench.options import option
from tandem.live.client import Endpoint

if TYPE_CHECKING:
    from tandem.live.server import LiveServer

MODEL_NAME = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """The options that both subjects have."""

    target: str = option(bundled.TARGET_NAME, "a folder or an id")
    draft: str = option(bundled.DRAFT_NAME, "a folder or an id")
    dtype: str = option("float32", "lower ones may differ at near ties")
    output: Path = option(Path("docs/results"), "folder for the results", type=Path)
    work: Path = option(Path("bench-results"), "folder for the log", type=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedApp:
    """An app that runs, and its endpoint with each of its keys."""

    server: "LiveServer"
    endpoints: Mapping[str, Endpoint]


@contextmanager
def loaded_app(
    options: AppOptions, keys: Sequence[Mapping[str, Any]], **app_options: int
) -> Iterator[LoadedApp]:
    """An app with such keys, each of which has at least a name, and with further options."""
    from tandem.live.server import live_server  # needs Ray, which other commands do without

    entries = [{**key, "key": f"sk-{secrets.token_hex(16)}"} for key in keys]
    with TemporaryDirectory() as folder:
        key_file = Path(folder) / "keys.yaml"
        key_file.write_text(yaml.safe_dump({"keys": entries}))
        values = {
            "target": options.target,
            "draft": options.draft,
            "dtype": options.dtype,
            "served_model_name": MODEL_NAME,
            "api_keys_file": str(key_file),
            **{name: str(value) for name, value in app_options.items()},
        }
        with live_server(values, options.work / "load.log") as server:
            endpoints = {
                entry["name"]: replace(server.endpoint, api_key=entry["key"]) for entry in entries
            }
            yield LoadedApp(server=server, endpoints=endpoints)
