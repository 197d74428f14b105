"""The header of a safetensors file: what is in it, without reading the weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTH_BYTES = 8
# As the library's own limit; what claims to be longer is no safetensors file.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the file."""

    dtype: str
    """The tensor's dtype in the format's own words, such as "BF16" or "F8_E4M3"."""
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name; raises ValueError if it is cut off or broken."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if num_bytes < LENGTH_BYTES or header_len > MAX_HEADER_BYTES:
            raise ValueError("it is no safetensors file")
        data_start = LENGTH_BYTES + header_len
        if data_start > num_bytes:
            raise ValueError(f"it ends after {num_bytes} bytes, in the middle of its header")
        content = _parse(file.read(header_len))
    try:
        data_len = max((entry["data_offsets"][1] for entry in content.values()), default=0)
        header = {
            name: TensorEntry(dtype=str(entry["dtype"]), shape=tuple(entry["shape"]))
            for name, entry in content.items()
        }
    except (KeyError, TypeError, IndexError):
        raise ValueError("its header is no safetensors header") from None
    if data_start + data_len != num_bytes:
        raise ValueError(f"it has {num_bytes} bytes instead of {data_start + data_len}")
    return header


def _parse(header: bytes) -> dict[str, Any]:
    try:
        content = json.loads(header)
    except ValueError:
        raise ValueError("its header is no safetensors header") from None
    if not isinstance(content, dict):
        raise ValueError("its header is no safetensors header")
    content.pop("__metadata__", None)
    return content
