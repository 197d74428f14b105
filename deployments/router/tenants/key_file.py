"""Where API keys are written: a file, which is read again whenever it changes.

A name that ends in .yaml or .yml is YAML, a list `keys` of entries as KeyEntry has them. Any other
file has a key on each line, alone or behind its name; `#` begins a comment. What is said of a wrong
file never repeats a word of it, since that could be a key.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.option_errors import nearest
from deployments.router.tenants.keys import ApiKey, KeyLimits, KeyRing, Keys, Tenant, digest_of
from workers.errors import ConfigError

logger = logging.getLogger(__name__)

POLL_S = 1.0
MIN_KEY_LENGTH = 8
MAX_KEYS = 10_000
KEY = re.compile(r"[!-~]+")
"""What an HTTP header can carry without doubt: printable ASCII, no spaces."""
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class KeyEntry(BaseModel):
    """One key of a YAML file: `key`, or its `sha256` in hexadecimal digits, and its limits."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: str
    key: str | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    weight: Positive = 1.0
    requests_per_second: Positive | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        if not NAME.fullmatch(self.name):
            raise ValueError("its name must have 1 to 64 of the characters A-Z a-z 0-9 _ . @ -")
        if self.key is not None:
            _check_key(self.key)
        return self

    @property
    def api_key(self) -> ApiKey:
        digest = digest_of(self.key) if self.key is not None else bytes.fromhex(self.sha256 or "")
        limits = KeyLimits(
            requests_per_second=self.requests_per_second,
            max_concurrent=self.max_concurrent,
            tokens_per_minute=self.tokens_per_minute,
        )
        tenant = Tenant(name=self.name, weight=self.weight, limits=limits)
        return ApiKey(digest=digest, tenant=tenant)


def _check_key(key: str) -> None:
    if len(key) < MIN_KEY_LENGTH or not KEY.fullmatch(key):
        raise ValueError(
            f"a key must have at least {MIN_KEY_LENGTH} characters, printable ASCII without spaces"
        )


def named_digests(digests: Sequence[bytes], prefix: str) -> list[ApiKey]:
    """Keys that came without names, called prefix-1 and so on."""
    return [
        ApiKey(digest=digest, tenant=Tenant(name=f"{prefix}-{number}"))
        for number, digest in enumerate(digests, start=1)
    ]


def digests_of_list(text: str, source: str) -> tuple[bytes, ...]:
    """The digests of keys that commas separate; raises ConfigError, which names their source."""
    keys = [key.strip() for key in text.split(",") if key.strip()]
    for number, key in enumerate(keys, start=1):
        try:
            _check_key(key)
        except ValueError as error:
            raise ConfigError(f"{source} is wrong: key {number}: {error}") from None
    return tuple(dict.fromkeys(map(digest_of, keys)))


def read_key_file(path: Path) -> list[ApiKey]:
    """The keys of a file; raises ConfigError for one that cannot be read or is wrong."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"api_keys_file={path} cannot be read: {reason}; give a file of keys"
        ) from None
    try:
        keys = _of_yaml(text) if path.suffix in (".yaml", ".yml") else _of_lines(text)
        _check_together(keys)
    except ValueError as error:
        raise ConfigError(f"api_keys_file={path} is wrong: {error}") from None
    return keys


def _of_lines(text: str) -> list[ApiKey]:
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            if len(words) > 2:
                raise ValueError("it must be a key, or a name and a key")
            name = words[0] if len(words) == 2 else f"key-{number}"
            keys.append(_entry({"name": name, "key": words[-1]}))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return keys


def _of_yaml(text: str) -> list[ApiKey]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"it is no YAML{where}") from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it must have a list `keys`")
    keys = []
    for number, entry in enumerate(entries, start=1):
        try:
            keys.append(_entry(entry))
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from None
    return keys


def _entry(entry: Any) -> ApiKey:
    """The key of an entry; raises ValueError with a sentence that repeats nothing of it."""
    if not isinstance(entry, dict):
        raise ValueError("it must be an object with name and key")
    try:
        return KeyEntry.model_validate(entry).api_key
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "extra_forbidden":  # whose name may be a key, so it is not repeated
        near = nearest(str(first["loc"][-1]), KeyEntry.model_fields)
        hint = f"did you mean {near!r}? The" if near else "the"
        known = ", ".join(KeyEntry.model_fields)
        raise ValueError(f"it has an unknown field; {hint} fields are {known}")
    message = first["msg"].removeprefix("Value error, ")
    field = ".".join(map(str, first["loc"]))
    raise ValueError(f"{field}: {message}" if field else message)


def _check_together(keys: Sequence[ApiKey]) -> None:
    if not keys:
        raise ValueError("it has no key; a server that anybody may use has no api_keys_file")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"it has {len(keys)} keys; at most {MAX_KEYS} are taken")
    tenants: dict[str, Tenant] = {}
    for key in keys:
        if tenants.setdefault(key.tenant.name, key.tenant) != key.tenant:
            raise ValueError(
                f"two keys are called {key.tenant.name!r} and differ in weight or limits; "
                "keys of one name share these"
            )
    if len({key.digest for key in keys}) < len(keys):
        raise ValueError("a key stands there twice")


def load_keys(path: Path | None, digests: Sequence[bytes]) -> KeyRing:
    """All keys: those of a file, if there is one, and those of the environment, by digest."""
    in_file = [] if path is None else read_key_file(path)
    return KeyRing([*in_file, *named_digests(digests, "environment")])


async def watch_key_file(keys: Keys, path: Path, digests: Sequence[bytes]) -> None:
    """Read the file again whenever it changes, for ever; a wrong one leaves the keys as they are.

    Requests that run go on, also those of a key that is gone.
    """
    seen: object = object()  # what was loaded may have changed since
    while True:
        await asyncio.sleep(POLL_S)
        state = await asyncio.to_thread(_state, path)
        if state == seen:
            continue
        seen = state
        try:
            keys.ring = await asyncio.to_thread(load_keys, path, digests)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("the API keys were read again: %d names", keys.ring.num_tenants)


def _state(path: Path) -> tuple[int, int, int] | None:
    """Differs whenever the file does; None while there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
