"""Tandem on Ray Serve: `serve run deployments:app target=<model> draft=<smaller model>`."""

from collections.abc import Mapping
from typing import Any

from ray import serve

from deployments.args import AppArgs
from deployments.builder import build, start_serve
from deployments.preflight import check_start
from deployments.refusal import refused_in_a_sentence

__all__ = ["AppArgs", "app", "build"]


def app(args: Mapping[str, Any] | AppArgs) -> serve.Application:
    """What `serve run` and config files import: starts Serve's ports, returns the application.

    Args:
        args: names and values, which are checked, and so are the models that they name; or
            options that were.

    Raises: what ends the caller with one sentence, if the options cannot be served.
    """
    with refused_in_a_sentence():
        checked = args if isinstance(args, AppArgs) else check_start(args).args
        start_serve(checked)
        return build(checked)
