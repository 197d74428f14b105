"""How many replicas a deployment has: a number, or a range to scale within."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ReplicaRange(BaseModel):
    """A number of replicas, or `min:max` to let Serve scale between the two."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    minimum: int = Field(ge=1)
    maximum: int = Field(ge=1)

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"minimum": value, "maximum": value}
        if isinstance(value, str):
            first, colon, second = value.partition(":")
            try:
                return {"minimum": int(first), "maximum": int(second) if colon else int(first)}
            except ValueError:
                raise ValueError(
                    f"{value!r} is neither a number of replicas nor min:max, like 2 or 1:4"
                ) from None
        return value

    @model_validator(mode="after")
    def _check_order(self) -> "ReplicaRange":
        if self.minimum > self.maximum:
            raise ValueError(f"{self.minimum}:{self.maximum} has its maximum below its minimum")
        return self

    def __str__(self) -> str:
        if self.is_fixed:
            return str(self.minimum)
        return f"{self.minimum}:{self.maximum}"

    @property
    def is_fixed(self) -> bool:
        """Whether Serve never scales them."""
        return self.minimum == self.maximum

    def serve_options(self) -> dict[str, Any]:
        """The deployment options that ask Serve for this many replicas."""
        if self.is_fixed:
            return {"num_replicas": self.minimum}
        return {
            "num_replicas": None,
            "autoscaling_config": {"min_replicas": self.minimum, "max_replicas": self.maximum},
        }


ONE_REPLICA = ReplicaRange(minimum=1, maximum=1)
