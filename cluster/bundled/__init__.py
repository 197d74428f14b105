"""Names of the bundled pair, and where it lies in whatever place this package is installed."""

from pathlib import Path

PAIR_FOLDER = Path(__file__).parent
TARGET_NAME = "tandem-demo"
DRAFT_NAME = "tandem-demo-draft"

_FOLDERS = {TARGET_NAME: PAIR_FOLDER / "target", DRAFT_NAME: PAIR_FOLDER / "draft"}


def resolve(name: str) -> str:
    """The folder of a bundled model; any other name as it is.

    Names, not folders, travel between processes: the package may be installed elsewhere there.
    """
    folder = _FOLDERS.get(name)
    return str(folder) if folder is not None else name
