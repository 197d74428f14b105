"""What a config file's app says of itself when it cannot be."""

import time

import pytest
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

APP = "from a file"
TIMEOUT_S = 120


@pytest.mark.usefixtures("served")
def test_a_wrong_option_is_the_apps_message_in_a_sentence() -> None:
    config = {
        "applications": [
            {
                "name": APP,
                "route_prefix": "/file",
                "import_path": "deployments:app",
                "args": {"gama": 2},
            }
        ]
    }
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
    deadline = time.monotonic() + TIMEOUT_S
    while (app := serve.status().applications[APP]).status is not ApplicationStatus.DEPLOY_FAILED:
        assert time.monotonic() < deadline, app
        time.sleep(0.2)
    serve.delete(APP)
    sentence = "there is no option 'gama'; did you mean 'gamma'?"
    assert app.message == f"Deploying app {APP!r} failed with exception:\n{sentence}"
