"""Fused attention over the paged cache on CPUs: the C++ of `csrc/paged_attention.cpp`.

It is compiled once per machine, with the machine's own compiler, and kept beside torch's
extensions. Where there is no compiler, or what it makes does not agree with plain attention, the
gather path stays in charge.
"""

import hashlib
import logging
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils import cpp_extension

from workers.paged_kernel import ScoreRule, VarlenBatch, probe_error

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "paged_attention.cpp"
COMPILERS = ("c++", "g++")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-shared", "-fPIC")
MAX_HEAD_DIM = 256
# Outputs are of order one: a wrong mask is off by far more.
PROBE_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernel:
    """The compiled operator for one block size."""

    block_size: int

    @classmethod
    def find(
        cls,
        *,
        num_heads: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> "CpuKernel | None":
        """The kernel if it works here for these shapes, else None."""
        if dtype not in PROBE_TOLERANCES or max(key_dim, value_dim) > MAX_HEAD_DIM:
            return None
        if not _load_operator():
            return None
        kernel = cls(block_size=block_size)
        error = probe_error(
            kernel,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        if error > PROBE_TOLERANCES[dtype]:
            logger.warning("the CPU attention kernel is off by %.3g and is not used", error)
            return None
        return kernel

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: VarlenBatch, rule: ScoreRule
    ) -> Tensor:
        """See `PagedKernel`."""
        output: Tensor = torch.ops.tandem.paged_attention(
            query,
            keys,
            values,
            batch.query_starts,
            batch.context_lens,
            batch.block_table,
            self.block_size,
            rule.scale,
            rule.window or 0,
            rule.softcap or 0.0,
            rule.sinks,
        )
        return output


def _load_operator() -> bool:
    """Have `torch.ops.tandem.paged_attention`, compiled if need be; whether it is there."""
    if hasattr(torch.ops.tandem, "paged_attention"):
        return True
    try:
        torch.ops.load_library(str(_build()))
    except (OSError, RuntimeError) as error:
        logger.warning("no CPU attention kernel, so attention will be slower: %s", error)
        return False
    return True


def _build() -> Path:
    """The compiled library; raises RuntimeError or OSError."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"there is no C++ compiler ({' or '.join(COMPILERS)}) on this machine")
    folder = Path(cpp_extension.get_default_build_root()) / "tandem"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"paged_attention-{_fingerprint()}.so"
    with FileLock(library.with_suffix(".lock")):  # the target and its drafter start together
        if not library.exists():
            logger.info("compiling the CPU attention kernel, once on this machine")
            unfinished = library.with_suffix(".tmp")
            _compile(compiler, unfinished)
            unfinished.rename(library)
    return library


def _compile(compiler: str, output: Path) -> None:
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = [compiler, *FLAGS, *includes, str(SOURCE), "-o", str(output), *libraries]
    result = subprocess.run(
        [*command, "-lc10", "-ltorch_cpu"], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"{compiler} failed: {result.stderr.strip()[-500:]}")


def _fingerprint() -> str:
    """Changes with the source, torch and the kind of CPU: homes may be shared by many machines."""
    cpu_info = Path("/proc/cpuinfo")
    text = cpu_info.read_text() if cpu_info.exists() else torch.backends.cpu.get_cpu_capability()
    cpu = [line for line in text.splitlines() if line.startswith(("flags", "Features", "model"))]
    parts = [SOURCE.read_text(), " ".join(FLAGS), torch.__version__, *sorted(set(cpu))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
