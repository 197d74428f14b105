"""Tandem on Ray Serve: `serve run deployments:app target=<model> draft=<smaller model>`."""

from ray import serve

from deployments.args import AppArgs
from deployments.builder import build, start_serve

__all__ = ["AppArgs", "app", "build"]


def app(args: AppArgs) -> serve.Application:
    """What `serve run` and config files import: starts Serve's ports, returns the application.

    Serve validates `args` by its annotation, which must be the class itself: no postponed
    annotations in this module.
    """
    start_serve(args)
    return build(args)
