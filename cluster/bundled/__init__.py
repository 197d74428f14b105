"""Names of the bundled models, and where they lie in whatever place this package is installed."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from workers.model_source import ModelSource

PAIR_FOLDER = Path(__file__).parent
TARGET_NAME = "tandem-demo"
DRAFT_NAME = "tandem-demo-draft"
EARLY_EXIT_NAME = "tandem-demo-early-exit"
"""The target, trained on to draft by its first layer."""

_FOLDERS = {
    TARGET_NAME: PAIR_FOLDER / "target",
    DRAFT_NAME: PAIR_FOLDER / "draft",
    EARLY_EXIT_NAME: PAIR_FOLDER / "early_exit",
}


def is_bundled(name: str) -> bool:
    return name in _FOLDERS


Named = TypeVar("Named", str, ModelSource)


def resolve(model: Named) -> Named:
    """The model with the folder of a bundled one as its name; any other as it is.

    Names, not folders, travel between processes: the package may be installed elsewhere there.
    """
    if isinstance(model, ModelSource):
        return replace(model, name=resolve(model.name))
    folder = _FOLDERS.get(model)
    return str(folder) if folder is not None else model
