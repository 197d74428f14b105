"""Which model is meant: its name, which state of it, and whether code that it brings may run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelSource:
    """Where a model comes from. Functions that take one take a name alone too."""

    name: str
    """A folder, or a Hugging Face id."""
    revision: str | None = None
    """A branch, a tag or a commit of the id; None for its main branch."""
    trust_remote_code: bool = False
    """Whether Python code in its repository may be run, where transformers has none for it."""

    @classmethod
    def of(cls, model: "AnyModel") -> "ModelSource":
        return cls(name=model) if isinstance(model, str) else model

    @property
    def absolute(self) -> "ModelSource":
        """The same model, as processes find it that run in another folder."""
        path = Path(self.name)
        return replace(self, name=str(path.absolute())) if path.is_dir() else self

    @property
    def hub_options(self) -> dict[str, Any]:
        """What `from_pretrained` has to be told besides the name."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def __repr__(self) -> str:
        """The model's name and state, as sentences name them."""
        return repr(self.name) + (f" (revision {self.revision!r})" if self.revision else "")


AnyModel = str | ModelSource
