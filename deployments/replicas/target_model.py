"""What a rank of a target group loads: alike for all ranks. Imports torch."""

from cluster import bundled
from cluster.cores import usable_cores
from cluster.gpu_shares import target_gpu_share
from cluster.placement import check_tensor_parallel
from deployments.args import AppArgs
from workers.cpu import step_threads
from workers.drafters.model import SMALL_MODEL_BYTES
from workers.model import Model, load_config, load_model
from workers.paged_model import CacheOptions


def check_target(args: AppArgs) -> None:
    """Make sure that the ranks can share the target, before any of them loads it.

    Raises: as check_tensor_parallel and load_config.
    """
    config = load_config(bundled.resolve(args.target_source))
    check_tensor_parallel(args.target, config, args.tensor_parallel_size)


def load_target(args: AppArgs) -> Model:
    """This rank's shard of the target, or all of it, whose steps are the calling thread's: it gets
    the threads for them. Raises as load_model."""
    model = load_model(
        bundled.resolve(args.target_source),
        dtype=args.dtype,
        device=args.device,
        tp_size=args.tensor_parallel_size,
        quantization=args.quantization,
    )
    step_threads.use(num_target_threads(args, weight_bytes=model.num_weight_bytes))
    return model


def target_cache(args: AppArgs) -> CacheOptions:
    return CacheOptions(
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        kv_cache_gib=args.kv_cache_gib,
        prefix_caching=args.prefix_caching == "on",
        gpu_share=target_gpu_share(args.draft_gpu_share),
    )


def num_target_threads(args: AppArgs, *, weight_bytes: int) -> int:
    """CPU threads of a rank with so large a shard: by default the ranks share the cores of this
    process, and weights that fit a core's caches have one.

    Steps of those are so short that they would mostly wait for their other threads, whose cores
    routers and clients use too.
    """
    if args.target_num_threads is not None:
        return args.target_num_threads
    if weight_bytes < SMALL_MODEL_BYTES:
        return 1
    return max(1, usable_cores() // args.tensor_parallel_size)
