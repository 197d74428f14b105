"""What a description of hardware says."""

import pytest

from cluster.topology import Node, uses_gpus

CPU_NODE = Node(name="cpu", num_cpus=4)
GPU_NODE = Node(name="gpu", num_cpus=4, num_gpus=2)


@pytest.mark.parametrize(
    ("device", "nodes", "expected"),
    [
        ("auto", [CPU_NODE], False),
        ("auto", [CPU_NODE, GPU_NODE], True),
        ("auto", [], False),
        ("cpu", [GPU_NODE], False),
        ("cuda", [CPU_NODE], True),
        ("cuda:1", [GPU_NODE], True),
    ],
)
def test_auto_means_gpus_where_there_are_any(
    device: str, nodes: list[Node], expected: bool
) -> None:
    assert uses_gpus(device, nodes) is expected
