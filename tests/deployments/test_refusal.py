"""How whoever has asked for a start hears that it cannot be."""

import click
import pytest
from click.testing import CliRunner
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.exceptions import RayServeException

from deployments import app, refusal
from deployments.refusal import refused_in_a_sentence
from workers.errors import ConfigError

SENTENCE = "there is no option 'gama'; did you mean 'gamma'?"


def test_serve_run_ends_with_the_sentence() -> None:
    @click.command()
    def run() -> None:
        call_user_app_builder_with_args_if_necessary(app, {"gama": "2"})

    result = CliRunner().invoke(run)
    assert result.exit_code == 1
    assert result.output == f"Error: {SENTENCE}\n"


def test_a_config_file_shows_the_sentence_as_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's build task shows a RayServeException without its traceback, and tries once."""
    monkeypatch.setattr(refusal, "_is_in_a_task", lambda: True)
    with pytest.raises(RayServeException, match=f"^{SENTENCE[:-1]}"):
        app({"gama": "2"})


def test_other_callers_get_the_error() -> None:
    with pytest.raises(ConfigError, match=f"^{SENTENCE[:-1]}"), refused_in_a_sentence():
        raise ConfigError(SENTENCE)
