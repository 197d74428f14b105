"""The lines that a good start consists of."""

import json
import shlex
from collections.abc import Iterator, Mapping

from cluster import bundled
from cluster.found_model import FoundModel
from cluster.plan.text import size
from deployments.args import AppArgs, environment_keys
from deployments.exposure import is_loopback
from deployments.preflight import Preflight
from workers.types import WorkerInfo

PROMPT = "def read_config(path):\n"


def before_start(checked: Preflight) -> Iterator[str]:
    """Lines about the models that are going to be loaded, and their memory."""
    args = checked.args
    described = {model.name: _described(model) for model in checked.models}
    yield f"target: {described.get(args.target, args.target)}"
    yield f"drafts: {_drafts(args, described)}"
    if args.target == bundled.TARGET_NAME:
        yield "the demo pair is a toy that has read nothing but Python: its text is no measure"
    yield "starting; the first time on a machine takes a minute or more, as operators are compiled"


def _drafts(args: AppArgs, described: Mapping[str, str]) -> str:
    """The drafters in their order. Keys of `described` are names of models."""
    if not args.drafters:
        unused = "" if args.gamma in ("dynamic", 0) else f", and gamma={args.gamma} does nothing"
        return f"none (drafter=none), so every token is decoded plainly{unused}"
    model = args.draft_model or ""
    names = {"model": described.get(model, model)}
    drafters = "; where it has none, ".join(names.get(name, name) for name in args.drafters)
    if args.gamma == 0:
        return f"none, as gamma=0; drafter=none would not load what drafts otherwise: {drafters}"
    return drafters


def _described(model: FoundModel) -> str:
    return (
        f"{model.name}, {model.dtype}, {size(model.weight_bytes)} of weights and up to "
        f"{size(model.cache_bytes)} of KV cache{model.vocabulary and '; '}{model.vocabulary}"
    )


def ready(
    args: AppArgs, target: WorkerInfo, start_s: float, metrics_address: str | None
) -> Iterator[str]:
    """Where to send requests to, so that one can act on it.

    Args:
        target: of a replica of the target.
        start_s: how long the start took, in seconds.
        metrics_address: where Ray exports this node's metrics; None if that is not known.
    """
    scheme, tls = ("http", "") if args.tls_cert_file is None else ("https", ", TLS")
    url = f"{scheme}://{_reachable(args.http_host)}:{args.http_port}/v1"
    num_tokens = target.num_blocks * target.block_size
    body = {"model": args.model_name, "prompt": PROMPT, "max_tokens": 64, "temperature": 0}
    yield f"ready after {start_s:.0f} s"
    yield f"  base URL  {url}{_of_whom(args.http_host)}"
    yield f"  model     {args.model_name}, {target.max_model_len:,} tokens of prompt and completion"
    yield f"  KV cache  {num_tokens:,} tokens of all requests{_of_each(args)}"
    grpc_address = f"{_reachable(args.grpc_host)}:{args.grpc_port}"
    yield f"  gRPC      {grpc_address}{tls}{_of_whom(args.grpc_host)}"
    if metrics_address is not None:
        yield f"  metrics   http://{metrics_address}/metrics"
    has_keys = args.api_keys_file is not None or bool(environment_keys())
    trust = f"--cacert {shlex.quote(args.tls_cert_file)} " if args.tls_cert_file else ""
    key = "-H 'Authorization: Bearer YOUR_KEY' " if has_keys else ""
    yield (
        f"  try       curl {trust}{url}/completions {key}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )
    yield "  Ctrl-C ends it"


def _reachable(host: str) -> str:
    """A host to connect to, from this machine, for one to listen on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _of_each(args: AppArgs) -> str:
    return "" if str(args.num_target_groups) == "1" else ", in each target group"


def _of_whom(host: str) -> str:
    return "" if is_loopback(host) else f"  (it listens on {host}: other machines reach it too)"
