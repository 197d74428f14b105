"""Whether a model's files are to be had, here or from Hugging Face, and are what they should be.
Imports neither torch nor transformers' models, so that a wrong name is answered at once."""

from pathlib import Path

from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from workers.checkpoint import check_checkpoint, looks_like_path
from workers.errors import ModelNotFoundError

TIMEOUT_S = 5.0
CONFIG_NAME = "config.json"
ADVICE = "give the path of a folder with config.json and weights, or a Hugging Face model id"


def check_files(name: str) -> None:
    """Check a model's files as far as they are here; raises a ConfigError of `workers.errors`.

    Of an id that is not among downloaded models the hub is asked first, once and for seconds: its
    own client would try for half a minute to reach a server that is not there.
    """
    is_hub_id = not Path(name).exists() and not looks_like_path(name)
    if is_hub_id and not _is_cached(name):
        _check_online(name)
    check_checkpoint(name)


def _is_cached(name: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(name, CONFIG_NAME), str)
    except HFValidationError:
        raise ModelNotFoundError(
            f"model {name!r}: there is no such folder on this machine, and no Hugging Face model "
            f"can have this id; {ADVICE}"
        ) from None


def _check_online(name: str) -> None:
    missing = f"model {name!r} is neither a folder on this machine nor among downloaded models"
    if constants.is_offline_mode():
        raise ModelNotFoundError(f"{missing}, and HF_HUB_OFFLINE forbids to download it; {ADVICE}")
    try:
        url = hf_hub_url(name, CONFIG_NAME)
        status = get_session().head(url, timeout=TIMEOUT_S, follow_redirects=True).status_code
    except Exception:  # of whatever library the hub's client uses
        raise ModelNotFoundError(
            f"{missing}, and {constants.ENDPOINT} cannot be reached from here; check the name, or "
            "download it where there is a network and give the path of its folder"
        ) from None
    if status in (401, 403):
        raise ModelNotFoundError(
            f"{missing}, and {constants.ENDPOINT} does not give it out: check the name, or ask for "
            "access on the model's page and set HF_TOKEN"
        )
    if status == 404:
        raise ModelNotFoundError(
            f"{missing}, and {constants.ENDPOINT} has no {CONFIG_NAME} of that name; check the name"
        )
