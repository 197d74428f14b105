"""transformers as on a machine without torch: a router reads and writes text, and runs no model.

Where transformers finds torch it imports it, and much more, even for a tokenizer: several seconds
of a router's start and 250 MB of its memory.
"""

import logging
import sys
from types import ModuleType
from typing import cast


def import_without_torch() -> None:
    """Import transformers without its models, for as long as this process lives.

    Does nothing where transformers or torch are imported already. Afterwards torch can be imported,
    as the code of a tokenizer may do that comes with a model.
    """
    if sys.modules.keys() & {"torch", "transformers"}:
        return
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    logger = logging.getLogger("transformers")
    modules["torch"] = None  # Python's own way to say that there is no such module
    logger.addFilter(_nothing)  # it warns that there are no models
    try:
        import transformers

        # it looks for torch once, and remembers that
        assert not transformers.is_torch_available()
    finally:
        logger.removeFilter(_nothing)
        del modules["torch"]


def _nothing(_: logging.LogRecord) -> bool:
    return False
