"""The file that `tandem plan` reads: options of the app, and the nodes it is to run on.

    args: {target: meta-llama/Llama-3.1-8B, drafter: none, tensor_parallel_size: 2}
    nodes:
      - {name: l4, count: 2, num_cpus: 16, memory_gib: 64, num_gpus: 1, gpu_memory_gib: 22}

A config file of Serve, with `applications:` in place of `args:`, can hold `nodes:` too, since Serve
passes over what it does not know.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.option_errors import refuse_unknown
from cluster.options import AppArgs
from cluster.topology import Node
from workers.cache_size import GIB
from workers.errors import ConfigError


class NodeKind(BaseModel):
    """Nodes that are alike."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str = Field(min_length=1)
    count: int = Field(default=1, ge=1)
    num_cpus: int = Field(ge=0)
    """Cores of each node that Ray may give away."""
    memory_gib: float = Field(gt=0)
    """Main memory of each node."""
    num_gpus: int = Field(default=0, ge=0)
    """GPUs of each node."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of each GPU."""

    @model_validator(mode="before")
    @classmethod
    def _suggest_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            refuse_unknown(values, cls.model_fields, what="field")
        return values

    @model_validator(mode="after")
    def _check_together(self) -> "NodeKind":
        if self.num_gpus and self.gpu_memory_gib is None:
            raise ValueError(f"{self.name} has GPUs: say how large each is, by gpu_memory_gib")
        return self

    def nodes(self) -> list[Node]:
        return [
            Node(
                name=self.name if self.count == 1 else f"{self.name}-{index}",
                kind=self.name,
                num_cpus=self.num_cpus,
                num_gpus=self.num_gpus,
                memory_bytes=round(self.memory_gib * GIB),
                gpu_memory_bytes=round((self.gpu_memory_gib or 0) * GIB),
            )
            for index in range(self.count)
        ]


class PlanConfig(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    args: AppArgs
    nodes: tuple[NodeKind, ...]

    @model_validator(mode="before")
    @classmethod
    def _take_application(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("it must have args: and nodes:, as names with values")
        if "kind" in values and "spec" in values:
            raise ValueError(
                f"it is a {values['kind']} of Kubernetes; give what stands under its "
                "serveConfigV2, with nodes: beside it"
            )
        if "applications" in values:
            values = {"args": _application_args(values), "nodes": values.get("nodes")}
        refuse_unknown(values, cls.model_fields, what="field")
        if not values.get("nodes"):
            raise ValueError(
                "it must have nodes: a list of what there is to run on, like "
                "[{name: gpu, count: 2, num_cpus: 32, memory_gib: 256, num_gpus: 8, "
                "gpu_memory_gib: 80}]"
            )
        return {**values, "args": values.get("args") or {}}

    @model_validator(mode="after")
    def _check_nodes(self) -> "PlanConfig":
        device, has_gpus = self.args.device, any(kind.num_gpus for kind in self.nodes)
        if device.startswith("cuda") and not has_gpus:
            raise ValueError(f"device is {device!r}, but no node has num_gpus; use device: cpu")
        names = [kind.name for kind in self.nodes]
        if len({*names}) < len(names):
            raise ValueError(f"two kinds of nodes have one name: {', '.join(names)}")
        return self

    def all_nodes(self) -> tuple[Node, ...]:
        return tuple(node for kind in self.nodes for node in kind.nodes())


def load_plan_config(path: Path) -> PlanConfig:
    """Read and check a file; raises ConfigError of one line."""
    try:
        return PlanConfig.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {'; '.join(map(_said, error.errors()))}") from error


def _application_args(values: dict[str, Any]) -> Any:
    """The args of the one application of a Serve config file that is ours."""
    applications = values["applications"]
    if "args" in values:
        raise ValueError("it has both args: and applications:, which have args of their own")
    if not isinstance(applications, list) or not all(isinstance(a, dict) for a in applications):
        raise ValueError("applications: must be a list, as in a config file of Serve")
    ours = [a for a in applications if a.get("import_path", "deployments:app") == "deployments:app"]
    if len(ours) != 1:
        raise ValueError(
            f"{len(ours)} of its applications have import_path deployments:app; a plan is for one"
        )
    return ours[0].get("args")


def _said(error: Any) -> str:
    """One of pydantic's errors: where, what, and the value if it is short."""
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":
        said = str(error["ctx"]["error"])
    elif error["type"] == "missing":
        said = "is missing"
    else:
        said = f"{error['input']!r}: {error['msg']}"
    return f"{place}: {said}" if place else said
