"""The app's options (`cluster/options.py`), and those of a router that runs."""

from pydantic import BaseModel, ConfigDict

from cluster.options import AppArgs, Gamma, ReplicaRange, parse_options

__all__ = ["AppArgs", "ReplicaRange", "RouterConfig", "parse_options"]


class RouterConfig(BaseModel):
    """What can change while a router runs: `user_config` of the Router deployment."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    gamma: Gamma
    """As the option of the app, which it replaces; num_speculative_tokens still limits it."""
