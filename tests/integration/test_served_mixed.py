"""An app with every way to draft, in one batch."""

from tests.integration.conftest import Deploy
from tests.integration.mixed import OPTIONS, check_that_drafts_change_nothing


async def test_every_way_to_draft_in_one_batch_changes_nothing(
    deploy: Deploy, prompts: list[str]
) -> None:
    served = deploy(**OPTIONS)
    await served.set_gamma(8)
    await check_that_drafts_change_nothing(served, prompts)
