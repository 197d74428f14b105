"""The C++ operators of `csrc/`, as `torch.ops.tandem`.

They are compiled once per machine, with the machine's own compiler. Where there is none, or it
fails, everything works without them, only slower.
"""

import functools
import logging
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import cpp_extension

from workers.cpu import machine_cache

logger = logging.getLogger(__name__)

SOURCES = tuple(sorted((Path(__file__).parent / "csrc").glob("*.cpp")))
HEADERS = tuple(sorted((Path(__file__).parent / "csrc").glob("*.h")))
COMPILERS = ("c++", "g++")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-shared", "-fPIC")


@functools.cache  # what failed once is not tried again by every layer
def load_operators() -> bool:
    """Load the operators, compiled if need be; returns whether `torch.ops.tandem` has them."""
    try:
        sources = [source.read_text() for source in (*SOURCES, *HEADERS)]
        library = machine_cache.get_or_build("operators", ".so", (*sources, *FLAGS), _compile)
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        logger.warning("no C++ operators, so steps on this CPU are slower: %s", error)
        return False
    torch.library.register_fake("tandem::paged_attention", _attention_shape)
    torch.library.register_fake("tandem::packed_linear", _linear_shape)
    torch.library.register_fake("tandem::streamed_linear", _linear_shape)
    torch.library.register_fake("tandem::streamed_linears", _linear_shapes)
    torch.library.register_fake("tandem::coded_linear", _coded_shape)
    return True


def _compile(output: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"there is no C++ compiler ({' or '.join(COMPILERS)}) on this machine")
    logger.info("compiling the C++ operators, once on this machine")
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = [compiler, *FLAGS, *includes, "-x", "c++", "-", "-o", str(output), *libraries]
    # as one unit: torch's headers take far longer than what is in the sources
    unit = "".join(f'#include "{source}"\n' for source in SOURCES)
    result = subprocess.run(
        [*command, "-lc10", "-ltorch_cpu"], input=unit, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"{compiler} failed: {result.stderr.strip()[-500:]}")


# What tracing needs to know of the operators:


def _attention_shape(query: Tensor, _keys: Tensor, values: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], values.shape[2])


def _linear_shape(inputs: Tensor, _weight: Tensor, _bias: object, out_features: int) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], out_features)


def _coded_shape(
    inputs: Tensor, _codes: Tensor, _scales: Tensor, _table: object, bias: object, out_features: int
) -> Tensor:
    return _linear_shape(inputs, inputs, bias, out_features)


def _linear_shapes(
    inputs: Tensor, _weights: object, _biases: object, out_features: Sequence[int]
) -> list[Tensor]:
    return [_linear_shape(inputs, inputs, None, size) for size in out_features]
