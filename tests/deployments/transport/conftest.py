"""A replica, and a client of it."""

from collections.abc import AsyncIterator

import pytest

from deployments.transport.messages import VERIFY
from deployments.transport.worker_streams import WorkerStreams
from tests.deployments.loops import wait_until
from tests.deployments.transport.streams import Client, Cluster, Replica


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    replica = Replica()
    await replica.listen()
    yield replica
    replica.server.close()


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[Client]:
    client: Client = WorkerStreams(Cluster(replica), VERIFY)
    await wait_until(lambda: "replica" in client._streams)
    yield client
    client.close()
