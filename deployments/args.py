"""The app's options (`cluster/options.py`), those of a running router, keys in the environment.

This is the only module that reads the environment.
"""

import os

from pydantic import BaseModel, ConfigDict

from cluster.options import AppArgs, Gamma, parse_options
from cluster.replica_range import ReplicaRange
from deployments.router.tenants.key_file import digests_of_list

__all__ = ["AppArgs", "ReplicaRange", "RouterConfig", "environment_keys", "parse_options"]

KEYS_VARIABLE = "TANDEM_API_KEYS"
"""API keys, separated by commas."""


def environment_keys() -> tuple[bytes, ...]:
    """The digests of the keys in this process's environment; raises ConfigError for a wrong one."""
    return digests_of_list(os.environ.get(KEYS_VARIABLE, ""), KEYS_VARIABLE)


class RouterConfig(BaseModel):
    """What can change while a router runs: `user_config` of the Router deployment."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    gamma: Gamma
    """As the option of the app, which it replaces; num_speculative_tokens still limits it."""
