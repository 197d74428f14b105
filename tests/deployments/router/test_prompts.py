"""Reading prompts with a real tokenizer: how long a text may be, and several at a time."""

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cluster import bundled
from deployments.router.prompts import NUM_THREADS, PromptReader
from deployments.router.tenants.keys import Tenant
from deployments.router.tokenizer import load_tokenizer
from tests.fakes import CHARACTERS, CharacterTokenizer
from workers.errors import ContextLengthError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(bundled.resolve(bundled.TARGET_NAME))


async def test_no_text_that_fits_is_refused(tokenizer: Any) -> None:
    """Each token's text, as often as the context has room for it."""
    reader = PromptReader(tokenizer, max_model_len=5)
    texts = [
        tokenizer.decode([token], skip_special_tokens=False) for token in range(len(tokenizer))
    ]
    longest = max(texts, key=len)
    prompts = [text * 5 for text in texts if "\N{REPLACEMENT CHARACTER}" not in text]
    read = await reader.read(prompts)
    assert len(read) == len(prompts) > 3900
    assert read == [tuple(tokenizer.encode(prompt)) for prompt in prompts]
    with pytest.raises(ContextLengthError) as caught:
        await reader.read(["é" * 1000])
    assert caught.value.field == "prompt"
    with pytest.raises(ContextLengthError):
        await reader.read([longest * 20])


async def test_nothing_is_logged_of_a_text_that_is_too_long(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked is told; transformers would warn whoever serves of indexing errors."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    ((*ids,),) = await PromptReader(tokenizer, max_model_len=8192).read(["word " * 5000])
    assert len(ids) > 4096
    assert not caplog.records


class HeldTokenizer(CharacterTokenizer):
    """Notes the first character of each text, and holds it until all are let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._hold(text)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text = super().decode(token_ids, skip_special_tokens=skip_special_tokens)
        self._hold(text)
        return text

    def _hold(self, text: str) -> None:
        self.begun.append(text[:1])
        assert self.go_on.wait(timeout=10)


ALICE, BOB = Tenant(name="alice"), Tenant(name="bob")
TOKEN = CHARACTERS.index("a")
FLOODS: dict[str, Callable[[PromptReader], Coroutine[Any, Any, Any]]] = {
    "texts": lambda reader: reader.read(["a" * 90], ALICE),
    "token ids": lambda reader: reader.detokenize([TOKEN] * 90, ALICE),
    "words": lambda reader: reader.read_words(["a" * 90], ALICE),
    "parts": lambda reader: reader.split([(TOKEN,)], ALICE, skip_special_tokens=True),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_many_texts_of_one_key_do_not_hold_up_another(name: str) -> None:
    tokenizer = HeldTokenizer()
    reader = PromptReader(tokenizer, max_model_len=100)
    flood = [asyncio.create_task(FLOODS[name](reader)) for _ in range(30)]
    while len(tokenizer.begun) < NUM_THREADS:
        await asyncio.sleep(0.01)
    quiet = asyncio.create_task(reader.read(["bb"], BOB))
    await asyncio.sleep(0)
    tokenizer.go_on.set()
    await quiet
    await asyncio.gather(*flood)
    # behind those that had begun, and one that came when these ended
    calls_each = (len(tokenizer.begun) - 1) // 30
    assert tokenizer.begun.index("b") <= 2 * NUM_THREADS * calls_each


async def test_texts_and_ids_keep_their_order(tokenizer: Any) -> None:
    reader = PromptReader(tokenizer, max_model_len=100)
    ids = (5, 6, 7)
    a, b = tuple(tokenizer.encode("def f(")), tuple(tokenizer.encode("class A"))
    assert await reader.read(["def f(", ids, "class A", ids]) == [a, ids, b, ids]
    assert await reader.read([ids]) == [ids]


async def test_a_tokenizer_that_would_truncate_reads_whole_texts_in_threads(
    tmp_path: Path,
) -> None:
    source = Path(bundled.resolve(bundled.TARGET_NAME))
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / name)
    settings = json.loads((source / "tokenizer.json").read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer: Any = load_tokenizer(str(tmp_path))
    assert tokenizer.backend_tokenizer.truncation is None  # nothing is left to be changed
    reader = PromptReader(tokenizer, max_model_len=1000)
    text = "def f(x): return x\n" * 40
    reads = await asyncio.gather(*[reader.read([text]) for _ in range(8)])
    assert len({read[0] for read in reads}) == 1
    assert len(reads[0][0]) > 4
