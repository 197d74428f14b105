"""The API keys of the app that is fuzzed, and what clients without one may send in their place."""

from deployments.router.tenants.keys import ApiKey, KeyLimits, KeyRing, Tenant, digest_of

KEY = "sk-fuzz-free"
LIMITED_KEY = "sk-fuzz-limited"
LIMITS = KeyLimits(requests_per_second=1, max_concurrent=2, tokens_per_minute=5_000)
RING = KeyRing(
    [
        ApiKey(digest=digest_of(KEY), tenant=Tenant(name="free")),
        ApiKey(
            digest=digest_of(LIMITED_KEY), tenant=Tenant(name="limited", weight=0.5, limits=LIMITS)
        ),
    ]
)
WITH_KEY = (f"Bearer {KEY}", f"Bearer {LIMITED_KEY}")
WITHOUT_KEY = (None, "", "Bearer", "Bearer sk-fuzz", f"Basic {KEY}", f"Bearer {KEY} {KEY}", KEY)
"""What `authorization` may be."""
