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
        library = machine_cache.get_or_build("operators", (*sources, *FLAGS), _compile)
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
    compilers = [path for name in COMPILERS if (path := shutil.which(name)) is not None]
    failure = f"there is no C++ compiler ({' or '.join(COMPILERS)}) on this machine"
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    for compiler in compilers:  # c++ may be one that lacks what another has
        logger.info("compiling the C++ operators with %s, once on this machine", compiler)
        result = run_compiler(compiler, "-o", str(output), *libraries, "-lc10", "-ltorch_cpu")
        if result.returncode == 0:
            return
        failure = f"{compiler} failed: {result.stderr.strip()[-500:]}"
    raise RuntimeError(failure)


def run_compiler(compiler: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a C++ compiler on the sources, as one unit: torch's headers take most of the time."""
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    return subprocess.run(
        [compiler, *FLAGS, *includes, "-x", "c++", "-", *arguments],
        input="".join(f'#include "{source}"\n' for source in SOURCES),
        capture_output=True,
        text=True,
        check=False,
    )


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
