"""API keys in files and in the environment: what is read, what is refused, and no secret told."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from deployments.args import KEYS_VARIABLE, environment_keys
from deployments.router.tenants import key_file
from deployments.router.tenants.key_file import load_keys, read_key_file, watch_key_file
from deployments.router.tenants.keys import KeyLimits, KeyRing, Keys, Tenant, digest_of
from workers.errors import ConfigError

SECRET = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"


def write(folder: Path, text: str, name: str = "keys.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_lines_are_keys_alone_or_behind_a_name(tmp_path: Path) -> None:
    path = write(tmp_path, f"# ours\n\n{SECRET}\n  alice   {OTHER}  # hers\n")
    ring = load_keys(path, ())
    assert ring.find(SECRET) == Tenant(name="key-3")
    assert ring.find(OTHER) == Tenant(name="alice")
    assert ring.find("sk-nobody-has-this") is None
    assert ring.find("") is None
    assert ring.find("sk-\udc80") is None
    assert (ring.num_tenants, ring.is_open) == (2, False)


def test_yaml_has_names_weights_and_limits(tmp_path: Path) -> None:
    text = f"""
keys:
  - name: alice
    key: {SECRET}
    weight: 2
    requests_per_second: 0.5
    max_concurrent: 8
    tokens_per_minute: 60000
  - {{name: bob, sha256: {digest_of(OTHER).hex().upper()}}}
"""
    ring = load_keys(write(tmp_path, text, "keys.yaml"), ())
    limits = KeyLimits(requests_per_second=0.5, max_concurrent=8, tokens_per_minute=60000)
    assert ring.find(SECRET) == Tenant(name="alice", weight=2.0, limits=limits)
    assert ring.find(OTHER) == Tenant(name="bob")


def test_two_keys_of_a_name_are_one_tenant(tmp_path: Path) -> None:
    ring = load_keys(write(tmp_path, f"alice {SECRET}\nalice {OTHER}\n"), ())
    assert ring.find(SECRET) == ring.find(OTHER)
    assert ring.num_tenants == 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("k.txt", "", "has no key"),
        ("k.txt", "# nothing\n", "has no key"),
        ("k.txt", f"{SECRET}\nalice {SECRET} more", "line 2: it must be a key"),
        ("k.txt", f"{SECRET}\n\nsk-1", "line 3: .*at least 8 characters"),
        ("k.txt", "clé-très-secrète", "line 1: .*ASCII"),
        ("k.txt", f"{SECRET}\n{SECRET}", "twice"),
        ("k.txt", f"al/ice {SECRET}", "line 1: its name"),
        ("k.yaml", f"keys: [{SECRET}", "no YAML"),
        ("k.yaml", SECRET, "list `keys`"),
        ("k.yaml", f"keys: [{SECRET}]", "entry 1: it must be an object"),
        ("k.yaml", f"keys: [{{name: a}}, {{key: {SECRET}}}]", "entry 1: give either"),
        ("k.yaml", f"keys: [{{name: a, key: {SECRET}}}, {{key: {SECRET}}}]", "entry 2: name"),
        ("k.yaml", f"keys: [{{name: a, {SECRET}: b}}]", "unknown field"),
        (
            "k.yaml",
            f"keys: [{{name: a, key: {SECRET}, max_concurent: 1}}]",
            "entry 1: it has an unknown field; did you mean 'max_concurrent'",
        ),
        ("k.yaml", f"keys: [{{name: a, sha256: {SECRET}}}]", "entry 1: sha256"),
        ("k.yaml", f"keys: [{{name: a, key: {SECRET}, weight: 0}}]", "entry 1: weight"),
        ("k.yaml", f"keys: [{{name: a, key: {SECRET}, weight: .nan}}]", "entry 1: weight"),
        ("k.yaml", f"keys: [{{name: a, key: {SECRET}, max_concurrent: {SECRET}}}]", "max_conc"),
        (
            "k.yaml",
            f"keys: [{{name: a, key: {SECRET}}}, {{name: a, key: {OTHER}, weight: 2}}]",
            "two keys are called 'a'",
        ),
    ],
)
def test_a_wrong_file_is_told_in_a_sentence_without_its_keys(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text, name)
    with pytest.raises(ConfigError, match=words) as caught:
        read_key_file(path)
    said = str(caught.value)
    assert said.startswith(f"api_keys_file={path} is wrong: ")
    for secret in (SECRET, OTHER, "secr", digest_of(SECRET).hex()):
        assert secret not in said
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_told(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(path)


def test_keys_of_the_environment_have_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f" {SECRET},{OTHER}, ")
    digests = environment_keys()
    ring = load_keys(None, digests)
    assert [ring.find(SECRET), ring.find(OTHER)] == [
        Tenant(name="environment-1"),
        Tenant(name="environment-2"),
    ]
    assert SECRET.encode() not in b"".join(digests)
    monkeypatch.setenv(KEYS_VARIABLE, f"{SECRET},short")
    with pytest.raises(ConfigError, match=f"{KEYS_VARIABLE} is wrong: key 2") as caught:
        environment_keys()
    assert "short" not in str(caught.value)
    monkeypatch.delenv(KEYS_VARIABLE)
    assert load_keys(None, environment_keys()).is_open


def test_nothing_that_is_printed_has_a_key_or_its_digest(tmp_path: Path) -> None:
    (key,) = read_key_file(write(tmp_path, SECRET))
    assert SECRET not in repr(key)
    assert repr(digest_of(SECRET)) not in repr(key)


async def wait_for(keys: Keys, key: str, *, is_known: bool) -> None:
    async with asyncio.timeout(10):
        while (keys.ring.find(key) is not None) != is_known:
            await asyncio.sleep(0.01)


async def test_a_changed_file_holds_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_file, "POLL_S", 0.01)
    path = write(tmp_path, SECRET)
    keys = Keys(load_keys(path, ()))
    watching = asyncio.create_task(watch_key_file(keys, path, ()))
    try:
        path.write_text(f"{SECRET}\n{OTHER}\n")
        await wait_for(keys, OTHER, is_known=True)
        replaced = write(tmp_path, OTHER, "new.txt")
        os.replace(replaced, path)  # as editors and Kubernetes do
        await wait_for(keys, SECRET, is_known=False)
        with caplog.at_level(logging.ERROR):
            path.write_text("oops")
            async with asyncio.timeout(10):
                while not caplog.records:
                    await asyncio.sleep(0.01)
            path.unlink()
            async with asyncio.timeout(10):
                while len(caplog.records) < 2:
                    await asyncio.sleep(0.01)
        assert keys.ring.find(OTHER) is not None  # a wrong file changes nothing
        assert "oops" not in caplog.text
        path.write_text(SECRET)
        await wait_for(keys, SECRET, is_known=True)
    finally:
        watching.cancel()


def test_every_key_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time tells nothing: neither whether a key is known nor where it stands."""
    ring = load_keys(None, [digest_of(f"sk-number-{number}") for number in range(5)])
    compared = []

    def compare(known: bytes, presented: bytes) -> bool:
        compared.append(known)
        return known == presented

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert ring.find("sk-number-0") == Tenant(name="environment-1")
    assert ring.find("sk-nobody") is None
    assert len(compared) == 10


def test_a_ring_without_keys_is_open() -> None:
    assert KeyRing().is_open
    assert KeyRing().num_tenants == 1
