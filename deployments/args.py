"""The app's options (`cluster/options.py`), those of a running router, keys in the environment.

This is the only module that reads the environment, or changes it.
"""

import os
from dataclasses import dataclass, field

from huggingface_hub import get_token
from pydantic import BaseModel, ConfigDict

from cluster.options import AppArgs, Gamma, parse_options
from cluster.replica_range import ReplicaRange
from deployments.router.tenants.key_file import digests_of_list

__all__ = [
    "AppArgs",
    "HubToken",
    "ReplicaRange",
    "RouterConfig",
    "environment_keys",
    "parse_options",
]

KEYS_VARIABLE = "TANDEM_API_KEYS"
"""The variable of the environment that has API keys, separated by commas."""


def environment_keys() -> tuple[bytes, ...]:
    """The digests of the keys in this process's environment; raises ConfigError for a wrong one."""
    return digests_of_list(os.environ.get(KEYS_VARIABLE, ""), KEYS_VARIABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubToken:
    """The token of Hugging Face of whoever starts the app, by which replicas load gated models.

    It travels to them as an argument: what an environment for Ray's workers holds can be read in
    its logs and its dashboard.
    """

    value: str | None = field(repr=False)

    @classmethod
    def find(cls) -> "HubToken":
        """The token of HF_TOKEN, or of `hf auth login`; perhaps none."""
        return cls(value=get_token())

    def use(self) -> None:
        """Have this process, and those that it starts, ask the hub with it."""
        if self.value is not None:
            os.environ["HF_TOKEN"] = self.value


class RouterConfig(BaseModel):
    """What can change while a router runs: `user_config` of the Router deployment."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    gamma: Gamma
    """The draft length, in place of the app's option of the same name; num_speculative_tokens still
    limits it."""
