"""Language models inside multimodal wrappers, of which text needs a part.

A wrapper's own code runs its language model; what it has for images, sound and video beside that is
never run by text, and would hold memory for nothing.
"""

from collections.abc import Callable, Iterator

from torch import nn
from transformers import PreTrainedModel


def drop_towers(module: PreTrainedModel, run_text: Callable[[], object]) -> None:
    """Remove the parts beside a wrapper's language model that text does not run through.

    Args:
        run_text: runs a few tokens through the module.
    """
    if module.config.get_text_config(decoder=True) is module.config:
        return
    parts = list(_parts_beside_text(module))
    run_parts: set[nn.Module] = set()
    hooks = [
        getattr(owner, name).register_forward_pre_hook(lambda part, _: run_parts.add(part))
        for owner, name in parts
    ]
    run_text()
    for hook in hooks:
        hook.remove()
    for owner, name in parts:
        if getattr(owner, name) not in run_parts:
            setattr(owner, name, None)


def _parts_beside_text(module: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """Yield the owners and names of the modules that hold no part of the language model."""
    needed = {module.get_decoder(), module.get_output_embeddings()}
    owners: list[nn.Module] = [module]
    for owner in owners:
        for name, child in owner.named_children():
            if needed.isdisjoint(child.modules()):
                yield owner, name
            elif child not in needed:
                owners.append(child)
