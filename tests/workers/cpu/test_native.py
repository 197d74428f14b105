"""The C++ operators where they cannot be had."""

from pathlib import Path

import pytest
import torch
from torch import nn

from workers.cpu import machine_cache, native
from workers.cpu.packed_linear import PackedLinear, has_kernels


@pytest.fixture
def no_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a machine that has compiled nothing yet."""
    monkeypatch.setattr(
        machine_cache.cpp_extension, "get_default_build_root", lambda: str(tmp_path)
    )
    return tmp_path


def test_a_machine_without_a_compiler_serves_without(
    no_operators: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    assert not native.load_operators.__wrapped__()
    assert "there is no C++ compiler (c++ or g++) on this machine" in caplog.text
    assert not any(path.suffix != ".lock" for path in no_operators.rglob("operators-*"))


def test_a_failing_compiler_leaves_no_library(
    no_operators: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not any(map(native.shutil.which, native.COMPILERS)):
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr(native, "FLAGS", ("--no-such-flag",))
    assert not native.load_operators.__wrapped__()
    assert "++ failed" in caplog.text
    assert not any(path.suffix != ".lock" for path in no_operators.rglob("operators-*"))


def test_a_compiler_that_cannot_is_followed_by_the_next(
    no_operators: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where `c++` is one without OpenMP."""
    monkeypatch.setenv("PATH", str(no_operators))
    fakes = {"c++": "exit 1", "g++": 'while [ "$1" != -o ]; do shift; done; echo compiled > "$2"'}
    for name, script in fakes.items():
        (no_operators / name).write_text(f"#!/bin/sh\n{script}\n")
        (no_operators / name).chmod(0o755)
    assert not native.load_operators.__wrapped__()
    (library,) = (path for path in no_operators.rglob("operators-*") if path.suffix != ".lock")
    assert library.read_text() == "compiled\n"
    assert "++ failed" not in caplog.text


@pytest.mark.skipif(not has_kernels(), reason="no packed bf16 products on this CPU")
def test_packed_products_do_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(96, 200, dtype=torch.bfloat16)
    inputs = torch.randn(1, 5, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        with_operators = PackedLinear(linear)(inputs)
        monkeypatch.setattr(native, "load_operators", lambda: False)
        assert torch.equal(PackedLinear(linear)(inputs), with_operators)
