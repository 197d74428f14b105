"""Splitting what a model thinks from what it answers, by the tags around its thoughts."""

from dataclasses import dataclass

from deployments.router.chat.tool_calls import num_held


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """The tags between which a model thinks, before it answers."""

    opening: str
    closing: str

    def is_open_in(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has opened the thoughts, so that the model need not."""
        return prompt_end.rfind(self.opening) > prompt_end.rfind(self.closing)


KNOWN_TAGS = (
    ReasoningTags(opening="<think>", closing="</think>"),
    ReasoningTags(opening="[THINK]", closing="[/THINK]"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitText:
    """A text's thoughts and the rest, without the spaces around thoughts."""

    thoughts: str = ""
    rest: str = ""
    end: int = 0
    """Where the thoughts have ended in the text, behind their tag; 0 if there are none."""


def split_reasoning(text: str, tags: ReasoningTags, *, is_open: bool, is_final: bool) -> SplitText:
    """A text split behind the thoughts that it begins with.

    As long as the text is not final, both parts leave out what may become part of a tag.

    Args:
        is_open: whether the prompt has ended within thoughts.
    """
    start = len(text) - len(text.lstrip())
    begun = text[start:]
    if begun.startswith(tags.opening):
        begun = begun[len(tags.opening) :]
    elif not is_final and tags.opening.startswith(begun):
        return SplitText()
    elif not is_open:
        return SplitText(rest=text)
    thoughts, closing, rest = begun.partition(tags.closing)
    if not closing and not is_final:
        thoughts = thoughts[: len(thoughts) - num_held(thoughts, tags.closing)]
    return SplitText(thoughts=thoughts.strip(), rest=rest.lstrip(), end=len(text) - len(rest))
