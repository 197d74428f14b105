"""Names of the bundled models, and where they lie in whatever place this package is installed."""

from pathlib import Path

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


def resolve(name: str) -> str:
    """The folder of a bundled model; any other name as it is.

    Names, not folders, travel between processes: the package may be installed elsewhere there.
    """
    folder = _FOLDERS.get(name)
    return str(folder) if folder is not None else name
