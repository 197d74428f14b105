"""Which blocks of the KV cache hold which text, so that what begins alike is not run again.

The keys and values of a token depend on the tokens before it and nothing else. A full block is
therefore known by a hash over all tokens up to its end, and any sequence that begins with these may
share it. The hash is cryptographic: a collision would give one client another's text. A salt keeps
the texts of different clients apart, since being answered sooner tells what others have asked.
"""

import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES = 16


class PrefixCache:
    """Full blocks by the text up to their end."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def key(self, before: bytes | None, tokens: Sequence[int], salt: str) -> bytes:
        """The key of a block with these tokens, behind the block of key `before`, if any."""
        assert len(tokens) == self._block_size, f"{len(tokens)} tokens are no full block"
        start = hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
        content = (before or start) + array("q", tokens).tobytes()
        return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()

    def find(self, tokens: Sequence[int], salt: str) -> tuple[list[int], list[bytes]]:
        """The longest known beginning of a text: its blocks and their keys."""
        blocks: list[int] = []
        keys: list[bytes] = []
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            key = self.key(keys[-1] if keys else None, tokens[end - self._block_size : end], salt)
            block_id = self._blocks.get(key)
            if block_id is None:
                break
            blocks.append(block_id)
            keys.append(key)
        return blocks, keys

    def add(self, key: bytes, block_id: int) -> bool:
        """Remember a block unless another has the same text; returns whether it was added."""
        if key in self._blocks:
            return False
        assert block_id not in self._keys, f"block {block_id} is known by another text"
        self._blocks[key] = block_id
        self._keys[block_id] = key
        return True

    def remove(self, block_id: int) -> None:
        """Forget a block whose content is about to be overwritten."""
        del self._blocks[self._keys.pop(block_id)]
