"""API keys, kept as digests only, and whom each belongs to."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What the requests of one key may use, all routers together; None means no limit."""

    requests_per_second: float | None = None
    max_concurrent: int | None = None
    """Completions that run or wait at a time."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and completions."""


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whom a key belongs to: what requests are counted, limited and logged by."""

    name: str
    weight: float = 1.0
    """The tenant's share of a router that is busy, next to the weights of others."""
    limits: KeyLimits = NO_LIMITS


ANYBODY = Tenant(name="")
"""Whoever asks a server that has no keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key. What is kept of it tells nobody the key."""

    digest: bytes = field(repr=False)
    tenant: Tenant


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key, which is long and random, so that this needs no salt."""
    return hashlib.sha256(key.encode(errors="backslashreplace")).digest()


class KeyRing:
    """The keys of a server at one time. Without keys it is open to anybody."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)
        self.num_tenants = max(1, len({key.tenant.name for key in self._keys}))
        """How many share the server; whoever asks an open one is one."""

    @property
    def is_open(self) -> bool:
        return not self._keys

    def find(self, key: str) -> Tenant | None:
        """Whom a key belongs to, None if to nobody. Takes as long whichever key it is."""
        presented = digest_of(key)
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, presented):
                found = known.tenant
        return found


class Keys:
    """The keys that are valid now; they may be replaced while requests run."""

    def __init__(self, ring: KeyRing | None = None) -> None:
        self.ring = ring or KeyRing()
