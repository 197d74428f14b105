"""The file of the option `chat_template`."""

from pathlib import Path

from workers.errors import ConfigError


def read_template(path: str) -> str:
    """The text of a template's file; raises ConfigError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template is {path!r}, which cannot be read ({error}); give the path of a file "
            "with a template in Jinja, on the machine of each router"
        ) from None
