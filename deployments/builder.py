"""From options to deployments. Runs on the driver, without torch."""

from typing import Any

import ray
from ray import serve

from cluster.gpu_shares import target_gpu_share
from cluster.placement import RankResources, group_bundles, rank_resources
from cluster.topology import Node
from deployments.api.grpc_address import HostedGrpcOptions
from deployments.api.grpc_proxy import SERVICER_FUNCTION
from deployments.api.http_proxy import MIDDLEWARES_FUNCTION
from deployments.args import AppArgs, HubToken, environment_keys
from deployments.autoscaling import scaling_options
from deployments.exposure import check_exposure
from deployments.preflight import starts_ray
from deployments.replicas.draft_pool import DraftPool
from deployments.replicas.target_group import TargetGroup
from deployments.router.deployment import Router
from deployments.tls import TlsFiles, check_serve_has_tls

SERVE_ENVIRONMENT = {
    # a streamed token takes proxy and router half the time that it does by actor calls
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES_FUNCTION,
}
"""The environment of Serve's own processes. Whoever starts Serve without us, as a RayService does,
sets it too."""


def start_serve(args: AppArgs) -> None:
    """Start Serve with our HTTP and gRPC ports; a running Serve, as under a config file, is kept.

    `serve run` has no option for gRPC, hence this. Raises ConfigError where strangers could reach
    a Ray that asks for no token, and where a running Serve does not encrypt as the options ask.
    """
    if starts_ray():
        check_exposure(args)
    if not ray.is_initialized():
        ray.init(namespace="serve")
    check_exposure(args)
    tls = TlsFiles.of(args)
    serve.start(
        proxy_location="EveryNode",
        controller_options={"runtime_env": {"env_vars": SERVE_ENVIRONMENT}},
        http_options={
            "host": args.http_host,
            "port": args.http_port,
            "ssl_keyfile": tls.key_file,
            "ssl_certfile": tls.cert_file,
        },
        grpc_options=HostedGrpcOptions(
            host=args.grpc_host,
            port=args.grpc_port,
            grpc_servicer_functions=[SERVICER_FUNCTION],
            enable_reflection=args.grpc_reflection,
            tls_cert_file=tls.cert_file,
            tls_key_file=tls.key_file,
        ),
    )
    check_serve_has_tls(args)


def build(args: AppArgs) -> serve.Application:
    """The application graph: Router -> TargetGroup, DraftPool."""
    # decorated as deployments, which their types do not say
    target_group: Any = TargetGroup
    draft_pool: Any = DraftPool
    router: Any = Router
    hub_token = HubToken.find()
    nodes = _nodes()
    of_rank = rank_resources(args.device, nodes, target_gpu_share(args.draft_gpu_share))
    target = target_group.options(
        ray_actor_options={"num_cpus": 0, "num_gpus": of_rank.num_gpus},
        **scaling_options(args.num_target_groups),
        **_bundle_options(args.tensor_parallel_size, of_rank, nodes),
    ).bind(args, hub_token)
    draft = None
    if args.draft_model is not None:
        of_draft = rank_resources(args.device, nodes, args.draft_gpu_share)
        draft = draft_pool.options(
            ray_actor_options={"num_cpus": 0, "num_gpus": of_draft.num_gpus},
            **scaling_options(args.num_draft_replicas),
        ).bind(args, hub_token)
    application: serve.Application = router.options(
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        **args.num_router_replicas.serve_options(),
    ).bind(args, target, draft, environment_keys(), hub_token)
    return application


def _bundle_options(tp_size: int, of_rank: RankResources, nodes: list[Node]) -> dict[str, Any]:
    """What asks Serve for a bundle per rank, where a group has several."""
    if tp_size == 1:
        return {}
    return group_bundles(tp_size=tp_size, resources=of_rank, nodes=nodes).serve_options()


def _nodes() -> list[Node]:
    """The nodes of the running cluster."""
    return [
        Node(
            name=node["NodeID"],
            num_cpus=node["Resources"].get("CPU", 0),
            num_gpus=node["Resources"].get("GPU", 0),
        )
        for node in (ray.nodes() if ray.is_initialized() else [])
        if node["Alive"]
    ]
