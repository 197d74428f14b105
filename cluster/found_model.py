"""What a check before the start is told of the machine, and says of a model."""

from pydantic import BaseModel, ConfigDict


class Machine(BaseModel):
    """The cores and the memory to run on; torch finds the GPUs."""

    model_config = ConfigDict(frozen=True)

    num_cpus: int
    memory_bytes: int


class FoundModel(BaseModel):
    """A model as it will be loaded, and how much memory that takes."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    name: str
    dtype: str
    weight_bytes: int
    """Bytes of the weights that each rank holds."""
    cache_bytes: int
    """Bytes of each rank's KV cache, at most: what is free when it starts decides."""
    vocabulary: str = ""
    """What is done with a draft's tokens that are not the target's."""
