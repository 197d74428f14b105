"""A model's forward as one compiled function, for CPUs, where Python is much of a step.

torch.export makes a graph of the forward over the paged cache, and AOTInductor makes C++ of that,
for any number of tokens, sequences and blocks. A process of its own compiles it once per machine,
with low priority; weights are no part of it. Until it is there, and wherever it cannot be had, the
model's own forward serves.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import psutil
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers import attention, model_cache, step_inputs
from workers.cache_size import GIB
from workers.cpu import coded_linear, lifetime, machine_cache, native, packed_linear, step_probe
from workers.cpu import kernel as cpu_kernel
from workers.errors import first_line
from workers.first_layers import first_layers
from workers.model import Model, load_model
from workers.model_cache import past_lengths
from workers.model_source import ModelSource
from workers.paged_kernel import PagedKernel, VarlenBatch
from workers.precision import DTYPES
from workers.quantization import Quantization
from workers.step_inputs import AttentionBatch, LayerCache, StepInputs

logger = logging.getLogger(__name__)

LIBRARY = "forward.so"
NICENESS = 10
COMPILE_TIMEOUT_S = 1800.0
COMPILED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """What a compiled forward is made for."""

    source: ModelSource
    quantization: Quantization
    dtype: str
    block_size: int
    num_threads: int
    num_first_layers: int | None = None
    """See Model."""

    @classmethod
    def read(cls, text: str) -> "StepSpec":
        """Make a spec from the JSON that `asdict` gives."""
        fields = json.loads(text)
        return cls(**{**fields, "source": ModelSource(**fields["source"])})


class StepModule(nn.Module):
    """The model's forward with nothing but tensors going in and out."""

    def __init__(self, module: PreTrainedModel, kernels: Mapping[int, PagedKernel | None]) -> None:
        """`kernels` are those of the layers with attention, by their numbers in the model."""
        super().__init__()
        self.module = module
        self._kernels = kernels

    @classmethod
    def of(cls, model: Model, layers: Iterable[LayerCache]) -> "StepModule":
        """The module for a cache of these layers."""
        return cls(model.module, {layer.layer: layer.kernel for layer in layers})

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        slot_mapping: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """Shapes as in StepInputs, AttentionBatch, VarlenBatch; the caches layer by layer."""
        caches = zip(self._kernels.items(), keys, values, strict=True)
        layers = {
            layer: LayerCache(layer=layer, keys=layer_keys, values=layer_values, kernel=kernel)
            for (layer, kernel), layer_keys, layer_values in caches
        }
        varlen = VarlenBatch(
            query_starts=query_starts,
            context_lens=context_lens,
            block_table=block_table,
            max_query_len=0,  # the CPU kernel does not ask
            max_context_len=0,
        )
        batch = AttentionBatch(layers=layers, slot_mapping=slot_mapping, varlen=varlen)
        output = self.module(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=logit_rows,
            attention_batch=batch,
            **past_lengths(self.module.config, positions),
        )
        logits: Tensor = output.logits[0]
        return logits


class CompiledStep:
    """A compiled forward with a model's weights in it."""

    def __init__(self, folder: Path, model: Model) -> None:
        """Load it from where it was compiled to; raises RuntimeError."""
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / LIBRARY), 1)
        weights = _weights_of(model)
        names = runner.get_constant_names_to_original_fqns()
        if missing := set(names.values()) - set(weights):
            raise RuntimeError(f"the compiled forward wants weights {sorted(missing)[:3]}")
        self._weights = {own: weights[name] for own, name in names.items()}  # the runner keeps none
        runner.update_constant_buffer(self._weights, False, True, user_managed=True)
        self._run = runner.run

    @torch.inference_mode()
    def __call__(self, inputs: StepInputs) -> Tensor:
        """Run a step as Model.forward does.  # [num_rows, vocab]"""
        *vectors, keys, values = step_tensors(inputs)
        outputs: list[Tensor] = self._run([*vectors, *keys, *values])
        return outputs[0]


def obtain(model: Model, *, block_size: int, num_threads: int) -> CompiledStep | None:
    """The model's compiled forward, compiled first if this machine has not; None if it has none.

    Takes minutes at worst: call it beside the serving thread.
    """
    try:
        if (obstacle := _obstacle(model, block_size)) is not None:
            logger.info("%s is not compiled: %s", model.name, obstacle)
            return None
        dtype = next(name for name, dtype in DTYPES.items() if dtype == model.dtype)
        spec = StepSpec(
            source=model.source.absolute,
            quantization=model.quantization,
            dtype=dtype,
            block_size=block_size,
            num_threads=num_threads,
            num_first_layers=model.num_first_layers,
        )

        def compile_for(output: Path) -> None:
            _check_memory(model)  # a compiled one that is kept needs none
            _compile(spec, output)

        compiled = machine_cache.get_or_build("forward", _sources(model, spec), compile_for)
        step = CompiledStep(compiled, model)
        error = step_probe.probe_error(step, model, block_size=block_size)
    except Exception as failure:  # whatever it is, the model's own forward serves
        logger.warning("%s is not compiled, so it is slower: %s", model.name, first_line(failure))
        return None
    if not error <= step_probe.TOLERANCES[model.dtype]:
        logger.warning("the compiled forward of %s is off by %.3g: not used", model.name, error)
        return None
    logger.info("%s runs its compiled forward from now on", model.name)
    return step


def _obstacle(model: Model, block_size: int) -> str | None:
    """Why such a model is not compiled, if it is not."""
    if model.device.type != "cpu" or model.dtype not in COMPILED_DTYPES:
        return f"forwards in {model.dtype} on {model.device.type} are not"
    if model.irregularity is not None:
        return model.irregularity
    if model.quantization == "bnb_int8":
        return "the products of bitsandbytes are no operators of ours"
    if any(layer.kernel is None for layer in model.make_cache(1, block_size)):
        return "only our fused attention is one operator to a compiler, and it is not to be had"
    return None


def _check_memory(model: Model) -> None:
    """Raises RuntimeError if the compiling process cannot load the model once more."""
    needed, available = 2 * model.num_weight_bytes, psutil.virtual_memory().available
    if needed > available:
        raise RuntimeError(
            f"compiling needs {needed / GIB:.1f} GiB of memory for a while, and "
            f"{available / GIB:.1f} GiB are free"
        )


def _sources(model: Model, spec: StepSpec) -> list[str]:
    """What the compiled code depends on, besides torch and the machine."""
    config = model.module.config.to_dict()
    config.pop("_name_or_path", None)
    forward = sys.modules[type(model.module).__module__]
    own_modules = (
        attention,
        model_cache,
        step_inputs,
        cpu_kernel,
        native,
        packed_linear,
        coded_linear,
        step_probe,
    )
    traced = (forward, *own_modules, sys.modules[__name__])
    own = [Path(module.__file__ or "").read_text() for module in traced]
    shape = {
        **asdict(spec),
        "source": config,  # the configuration, not the name: no weights
        "weights": sorted(_weights_of(model)),  # how weights are laid out for this machine
    }
    return [json.dumps(shape, sort_keys=True, default=str), transformers.__version__, *own]


def _weights_of(model: Model) -> dict[str, Tensor]:
    """The weights by the names that a compiled forward has for them."""
    module = StepModule(model.module, {})
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _compile(spec: StepSpec, output: Path) -> None:
    """Compile in a process of its own: tracing would disturb the model that serves meanwhile."""
    logger.info("compiling the forward of %s, once on this machine", spec.source)
    started = time.monotonic()
    result = subprocess.run(
        _compile_command(spec, output),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=COMPILE_TIMEOUT_S,
        check=False,
        start_new_session=True,  # see lifetime.end_with
    )
    if result.returncode != 0:
        logger.info("the compiler said: %s", result.stderr)
        last_line = result.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"it cannot be compiled: {last_line[:500]}")
    logger.info("compiled in %.0f s", time.monotonic() - started)


def _compile_command(spec: StepSpec, output: Path) -> list[str]:
    arguments = [json.dumps(asdict(spec)), str(output), str(os.getpid())]
    return [sys.executable, "-m", __name__, *arguments]


def _main(spec: StepSpec, output: Path, worker_pid: int) -> None:
    threading.Thread(target=lifetime.end_with, args=[worker_pid], daemon=True).start()
    os.nice(NICENESS)
    torch.set_num_threads(spec.num_threads)
    model = load_model(spec.source, dtype=spec.dtype, device="cpu", quantization=spec.quantization)
    if spec.num_first_layers is not None:
        model = first_layers(model, spec.num_first_layers)
    inputs = step_probe.make_inputs(model, step_probe.EXAMPLE, block_size=spec.block_size)
    module = StepModule.of(model, inputs.attention.layers.values())
    auto = torch.export.Dim.AUTO
    vector, matrix = {0: auto}, {0: auto, 1: auto}
    caches = [vector for _ in model.layer_specs]
    with torch.no_grad():
        program = torch.export.export(
            module,
            step_tensors(inputs),
            dynamic_shapes=(
                {1: auto},
                {1: auto},
                vector,
                vector,
                vector,
                vector,
                matrix,
                caches,
                caches,
            ),
            strict=False,
        )
    if packed_linear.has_streams(model.dtype):
        packed_linear.join_products(program)
    output.mkdir()
    package = output / "forward.pt2"
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(package),
        inductor_configs={"aot_inductor.package_constants_in_so": False},
    )
    _unpack(package)


def _unpack(package: Path) -> None:
    """Put what is needed of a package in its place.

    Torch would unpack it for each process that loads it, into a temporary folder that stays when
    the process is killed.
    """
    with ZipFile(package) as archive:
        (library,) = (Path(name) for name in archive.namelist() if name.endswith(".so"))
        for suffix in (".so", ".json"):  # beside it: which operators it calls
            unpacked = archive.read(str(library.with_suffix(suffix)))
            (package.parent / LIBRARY).with_suffix(suffix).write_bytes(unpacked)
    package.unlink()


def step_tensors(inputs: StepInputs) -> tuple[Any, ...]:
    """What StepModule is called with."""
    batch = inputs.attention
    assert batch.varlen is not None
    return (
        inputs.tokens,
        inputs.positions,
        inputs.logit_rows,
        batch.slot_mapping,
        batch.varlen.query_starts,
        batch.varlen.context_lens,
        batch.varlen.block_table,
        [layer.keys for layer in batch.layers.values()],
        [layer.values for layer in batch.layers.values()],
    )


if __name__ == "__main__":
    _main(StepSpec.read(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
