"""Services in this process."""

from collections.abc import AsyncIterator

import pytest

from tests.deployments.loops import Models
from tests.deployments.serving import LocalServing, local_serving


@pytest.fixture
async def drafting(models: Models) -> AsyncIterator[LocalServing]:
    """A service with drafters, which has other names too."""
    async with local_serving(
        models.target, draft=models.draft, drafter="prompt_lookup,model", aliases=("small", "t/1")
    ) as serving:
        yield serving
