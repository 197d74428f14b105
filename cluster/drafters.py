"""The names of drafters, and the list of them that the option `drafter` takes."""

from collections.abc import Sequence

from cluster.option_errors import nearest

DRAFTERS = ("model", "prompt_lookup", "suffix", "early_exit")
"""The names that the option `drafter` may list."""

NAMES_ELSEWHERE = {
    "draft_model": "model",
    "layerskip": "early_exit",
    "ngram": "prompt_lookup",
    "standalone": "model",
}
"""What drafters are called by other programs."""


def read_drafters(value: str | Sequence[object]) -> str:
    """The drafters of a list with commas, or of YAML's own, as a list with commas.

    Raises ValueError about what is wrong in it.
    """
    parts = value.split(",") if isinstance(value, str) else value or [""]
    names = [str(part).strip() for part in parts]
    given = ",".join(names)
    if names == ["none"]:
        return given
    for name in names:
        if name == "none" or name not in DRAFTERS:
            raise ValueError(_wrong_drafter(name, given))
    if len({*names}) < len(names):
        raise ValueError(f"drafter is {given!r}, which names a drafter twice; name each once")
    return given


def _wrong_drafter(name: str, given: str) -> str:
    if name == "none":
        return f"drafter is {given!r}, but 'none' means no drafter; drop it, or the others"
    near = nearest(name, DRAFTERS, elsewhere=NAMES_ELSEWHERE)
    named = f", and there is no drafter {name!r}" if name != given else ""
    hint = f"did you mean {near!r}? It" if near else "it"
    known = ", ".join(map(repr, (*DRAFTERS, "none")))
    return f"drafter is {given!r}{named}; {hint} must be {known} or a list like 'suffix,model'"
