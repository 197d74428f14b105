"""How ranks share gpt2, whose layers are `Conv1D`: linear ones with weights the other way round.

Transformers' plans cut linear layers of torch. These are ways to cut a weight of [in, out], in its
terms. Queries, keys and values are three parts of one layer's outputs, and a rank has its heads of
each.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import (
    AllReduceParallel,
    LocalParamsParallel,
    TensorParallelLayer,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.pytorch_utils import Conv1D

NUM_PARTS = 3
"""The parts of what `c_attn` puts out: queries, keys and values."""


class ByOutputs(LocalParamsParallel):
    """Each rank has some outputs of a layer: of each of its parts, if these are several."""

    def __init__(self, num_parts: int = 1) -> None:
        self._num_parts = num_parts

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Leave this rank's share of a weight or bias, as transformers is going to read it."""
        last = module._parameters[param].ndim - 1  # type: ignore[union-attr]
        if self._num_parts == 1:
            _share(module, param, mesh, Shard(last))
        else:
            _share(module, param, mesh, _StridedShard(last, split_factor=self._num_parts))

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Have the layer run with its share."""
        narrow(module, mesh.size())
        way: Any = super()  # transformers has no types for it
        installed: nn.Module = way.install_forward(module, mesh)
        return installed


class ByInputs(AllReduceParallel):
    """Each rank has some inputs of a layer; its bias is added once, to the ranks' sum."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Leave this rank's share of a weight, and the whole bias."""
        _share(module, param, mesh, Replicate() if param == "bias" else Shard(0))

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Have the layer multiply by its share, and add up what the ranks have."""
        add_up: Any = self.transform_output_post_forward

        def forward(inputs: Tensor) -> Tensor:  # [..., in / ranks] -> [..., out]
            weight, bias = (_local(module, name) for name in ("weight", "bias"))
            total: Tensor = add_up(module, inputs @ weight, mesh)
            return total + bias

        module.forward = forward
        return module


class SomeHeads(TensorParallelLayer):
    """Each rank attends with some of the heads."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Tell the layer how many numbers the queries of a token are."""
        narrow(module, mesh.size())
        return module


def narrow(module: nn.Module, num_ranks: int) -> None:
    """Make the numbers by which a layer reshapes its outputs those of one rank."""
    if isinstance(module, GPT2Attention):
        module.split_size //= num_ranks
    elif isinstance(module, Conv1D):
        module.nf //= num_ranks


def register() -> None:
    """Make these ways known to transformers."""
    styles: dict[str, Any] = {
        "conv1d_by_outputs": ByOutputs(),
        "conv1d_by_heads": ByOutputs(NUM_PARTS),
        "conv1d_by_inputs": ByInputs(),
        "gpt2_heads": SomeHeads(),
    }
    for name, style in styles.items():
        ALL_PARALLEL_STYLES.register(name, style)


def _share(module: nn.Module, param: str, mesh: DeviceMesh, placement: Placement) -> None:
    whole = module._parameters[param]
    assert whole is not None
    shared = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    module._parameters[param] = nn.Parameter(shared, requires_grad=False)


def _local(module: nn.Module, name: str) -> Tensor:
    shared: Any = getattr(module, name)
    local: Tensor = shared.to_local()
    return local
