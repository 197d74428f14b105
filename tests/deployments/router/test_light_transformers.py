"""A router's process: without torch, and with the tokens and prompts of any other."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster import bundled
from deployments.router.tokenizer import load_tokenizer
from tests.tokenizers import save_speaking_model

ROOT = Path(__file__).parents[3]
TEXT = "def f(x):\n    return x  # Ümläute, 汉字 and </s>"
CHAT = [{"role": "user", "content": TEXT}]
CODE = f"""
import asyncio, json, sys
from deployments.router.light_transformers import import_without_torch
import_without_torch()
from deployments.api.grpc import Rpcs
from deployments.api.http import make_app
from deployments.router.chat.template import load_chat_template
from deployments.router.loop import RoundLoop
from deployments.router.tokenizer import load_tokenizer
from workers.end_tokens import find_stop_strings
shown = []
for name in sys.argv[1:]:
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode({TEXT!r})
    shown.append([ids, tokenizer.decode(ids, skip_special_tokens=True)])
    find_stop_strings(name)
    if tokenizer.chat_template:
        shown.append(tokenizer.apply_chat_template({CHAT!r}, tokenize=True)["input_ids"])
        asyncio.run(load_chat_template(
            tokenizer, path=None, tool_call_parser="auto", reasoning_parser="auto"
        ))
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
import torch
print(json.dumps(shown))
"""


def test_tokens_and_prompts_are_those_of_any_other_process(tmp_path: Path) -> None:
    names = [
        bundled.resolve(bundled.TARGET_NAME),
        save_speaking_model(tmp_path / "bytes", "byte level"),
        save_speaking_model(tmp_path / "pieces", "sentence piece"),
    ]
    expected: list[Any] = []
    for tokenizer in map(load_tokenizer, names):
        ids = tokenizer.encode(TEXT)
        expected.append([ids, tokenizer.decode(ids, skip_special_tokens=True)])
        if tokenizer.chat_template:
            expected.append(tokenizer.apply_chat_template(CHAT, tokenize=True)["input_ids"])
    assert len(expected) == len(names) + 1
    command = [sys.executable, "-c", CODE, *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout) == expected
