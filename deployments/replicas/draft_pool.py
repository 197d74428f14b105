"""The draft deployment: one replica is one drafter."""

import logging

from ray import serve

from cluster import bundled
from deployments.args import AppArgs, HubToken
from deployments.replicas.worker_replica import DEPLOYMENT_OPTIONS, WorkerReplica
from deployments.transport.messages import PROPOSE
from workers.types import ProposeRequest, ProposeResult

logger = logging.getLogger(__name__)


@serve.deployment(**DEPLOYMENT_OPTIONS)
class DraftPool(WorkerReplica[ProposeRequest, ProposeResult]):
    """Drafts for all routers, over streams; see `ModelDrafter.propose` for the contract."""

    async def __init__(self, args: AppArgs, hub_token: HubToken) -> None:  # type: ignore[misc]
        from workers.cpu import step_threads
        from workers.drafters.model import ModelDrafter, load_draft_model
        from workers.drafters.translated import make_drafter
        from workers.paged_model import CacheOptions
        from workers.vocabulary import compare_vocabularies

        hub_token.use()
        assert args.draft_source is not None
        target, draft = bundled.resolve(args.target_source), bundled.resolve(args.draft_source)
        vocabulary = compare_vocabularies(target, draft, args.heterogeneous_vocab)
        if vocabulary.description:
            logger.info("draft %s: %s", args.draft_model, vocabulary.description)

        def make_worker() -> ModelDrafter:
            step_threads.use(args.draft_num_threads)
            model = load_draft_model(
                draft,
                dtype=args.dtype,
                device=args.device,
                quantization=args.draft_quantization,
            )
            cache = CacheOptions(
                block_size=args.block_size,
                # a draft with the shorter context serves until it ends
                max_model_len=args.max_model_len and min(args.max_model_len, model.max_position),
                max_num_seqs=args.max_num_seqs,
                prefix_caching=args.prefix_caching == "on",
                gpu_share=args.draft_gpu_share,
            )
            return make_drafter(model, vocabulary, cache, target=target)

        await self._start(args, make_worker, PROPOSE, role="draft")
