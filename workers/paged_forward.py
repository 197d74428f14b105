"""A model's forward over its paged cache: what all ranks of a group run alike."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from workers.attention import Chunk
from workers.cpu import compiled_step
from workers.cuda import graphed_step
from workers.cuda.graphed_step import CacheShape
from workers.model import Model, StepInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The new tokens of a step, of all its sequences."""

    chunks: Sequence[Chunk]
    tokens: Sequence[int]
    """The chunks' new tokens, flattened in order."""
    logit_rows: Sequence[int]
    """Indices into `tokens` of those whose logits are wanted."""


class Ranks(Protocol):
    """The other ranks of a group that shares a model's weights.

    They make every forward together, so one of them decides what is run: it announces each plan,
    and the others run what they hear, in that order.
    """

    def least(self, number: int) -> int:
        """The least of all ranks' numbers; every rank must ask."""
        ...

    def announce(self, plan: StepPlan) -> None:
        """Have the others run it now."""
        ...


class PagedForward:
    """A model and the cache of its layers."""

    def __init__(self, model: Model, *, num_blocks: int, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self._spare_block = num_blocks
        self._layers = model.make_cache(num_blocks + 1, block_size)
        self._forward: Callable[[StepInputs], Tensor] = model.forward
        self.is_compiled = False
        """Whether steps are run by a compiled forward, or by a recorded one, from now on."""
        self.warnings: tuple[str, ...] = ()
        """Why not, where it was asked for and cannot be had."""

    def start_compiling(self, *, max_model_len: int) -> threading.Thread:
        """Have the forward compiled, beside the steps that run meanwhile; they use it from then on.

        Compiled for as many threads as the calling one has. On CUDA it is recorded instead, which
        bears no other work on the device: that is done when this returns.
        """
        is_cuda = self._model.device.type == "cuda"
        obtain: Callable[[], Callable[[StepInputs], Tensor] | None]
        if is_cuda:
            cache = CacheShape(
                layers=self._layers,
                block_size=self._block_size,
                max_model_len=max_model_len,
                spare_block=self._spare_block,
            )
            obtain = partial(graphed_step.obtain, self._model, cache)
        else:
            obtain = partial(
                compiled_step.obtain,
                self._model,
                block_size=self._block_size,
                num_threads=torch.get_num_threads(),
            )

        def obtain_and_switch() -> None:
            step = obtain()
            if step is not None:
                self._forward = step
                self.is_compiled = True
            elif not is_cuda:
                self.warnings = (
                    f"{self._model.name} has no compiled forward here, so its steps are slower; "
                    "the log says why",
                )

        thread = threading.Thread(target=obtain_and_switch, name="compile", daemon=True)
        thread.start()
        if is_cuda:
            thread.join()
        return thread

    def run(self, plan: StepPlan) -> Tensor:
        """Run and cache the tokens.  # [len(logit_rows), vocab]"""
        inputs = self._model.prepare(
            self._layers,
            plan.chunks,
            plan.tokens,
            plan.logit_rows,
            block_size=self._block_size,
        )
        return self._forward(inputs)
