"""Whether a model's files are to be had, here or from Hugging Face, and are what they should be.
Imports neither torch nor transformers' models, so that a wrong name is answered at once."""

from pathlib import Path

from huggingface_hub import constants, get_session, get_token, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from workers.checkpoint import (
    check_checkpoint,
    explain_gate,
    explain_revision,
    looks_like_path,
)
from workers.errors import ModelNotFoundError
from workers.model_source import AnyModel, ModelSource

TIMEOUT_S = 5.0
CONFIG_NAME = "config.json"
ADVICE = "give the path of a folder with config.json and weights, or a Hugging Face model id"


def check_files(model: AnyModel) -> None:
    """Check a model's files as far as they are here; raises a ConfigError of `workers.errors`."""
    check_found(model)
    check_checkpoint(ModelSource.of(model))


def check_found(model: AnyModel) -> None:
    """Make sure that there is such a model; raises a ConfigError of `workers.errors`.

    Of an id that is not among downloaded models the hub is asked, once and for seconds: its own
    client would try for half a minute to reach a server that is not there.
    """
    source = ModelSource.of(model)
    is_hub_id = not Path(source.name).exists() and not looks_like_path(source.name)
    if is_hub_id and not _is_cached(source):
        _check_online(source)


def _is_cached(source: ModelSource) -> bool:
    try:
        found = try_to_load_from_cache(source.name, CONFIG_NAME, revision=source.revision)
    except HFValidationError:
        raise ModelNotFoundError(
            f"model {source!r}: there is no such folder on this machine, and no Hugging Face model "
            f"can have this id; {ADVICE}"
        ) from None
    return isinstance(found, str)


def _check_online(source: ModelSource) -> None:
    missing = f"model {source!r} is neither a folder on this machine nor among downloaded models"
    if constants.is_offline_mode():
        raise ModelNotFoundError(f"{missing}, and HF_HUB_OFFLINE forbids to download it; {ADVICE}")
    try:
        url = hf_hub_url(source.name, CONFIG_NAME, revision=source.revision)
        token = get_token()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        answer = get_session().head(url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
    except Exception:  # of whatever library the hub's client uses
        raise ModelNotFoundError(
            f"{missing}, and {constants.ENDPOINT} cannot be reached from here; check the name, or "
            "download it where there is a network and give the path of its folder"
        ) from None
    status, reason = answer.status_code, answer.headers.get("X-Error-Code")
    if reason == "GatedRepo":
        raise explain_gate(source)
    if reason == "RevisionNotFound":
        raise explain_revision(source)
    if status in (401, 403):
        raise ModelNotFoundError(
            f"{missing}, and {constants.ENDPOINT} does not give it out: check the name, or ask for "
            "access on the model's page and set HF_TOKEN"
        )
    if status == 404:
        raise ModelNotFoundError(
            f"{missing}, and {constants.ENDPOINT} has no {CONFIG_NAME} of that name; check the name"
        )
