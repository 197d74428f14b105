"""Two API keys, of which one is limited."""

from typing import Any

from deployments.router.tenants.keys import ApiKey, KeyLimits, KeyRing, Tenant, digest_of

SECRET = "sk-0123456789abcdef"
LIMITED = "sk-limited-0123456789"
BEARER = {"Authorization": f"Bearer {SECRET}"}


def ring_of(**limits: Any) -> KeyRing:
    """Two keys, of which one is limited."""
    return KeyRing(
        [
            ApiKey(digest=digest_of(SECRET), tenant=Tenant(name="alice")),
            ApiKey(
                digest=digest_of(LIMITED), tenant=Tenant(name="bob", limits=KeyLimits(**limits))
            ),
        ]
    )
