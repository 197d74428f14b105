"""The version of Tandem, as the package that is installed says it."""

from importlib import metadata

UNKNOWN = "unknown"


def installed_version() -> str:
    """Tandem's version; "unknown" for a checkout that is not installed."""
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return UNKNOWN
