"""Compiled forwards against the models' own.

Each family is compiled once per machine, which takes some 20 s on its first run.
"""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.tiny_models import save_model
from tests.workers.decoding import random_drafts
from tests.workers.test_target import GREEDY, SAMPLED, generate, make_prompt
from workers.cpu import compiled_step, machine_cache, native, packed_linear, step_probe
from workers.cpu.compiled_step import CompiledStep, StepModule, StepSpec
from workers.cpu.packed_linear import has_streams
from workers.cpu.step_probe import TOLERANCES, make_inputs
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.step_inputs import StepInputs
from workers.target import Target

needs_compiler = pytest.mark.skipif(
    not native.load_operators(), reason="no C++ compiler on this machine"
)
BLOCK_SIZE = 4
CACHE = CacheOptions(block_size=BLOCK_SIZE, max_num_seqs=8)
# the second one: packed bf16 products, a sliding window, a soft cap, two kinds of layers
KINDS = [("llama", "float32"), ("gemma2", "bfloat16")]


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a machine that has compiled nothing yet."""
    folder = str(tmp_path / "cache")
    monkeypatch.setattr(machine_cache.cpp_extension, "get_default_build_root", lambda: folder)
    return tmp_path / "cache"


def forwards(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("forward-*") if path.suffix != ".lock"]


def make_model(folder: Path, family: str = "llama", dtype: str = "float32") -> Model:
    name = save_model(folder, family, num_hidden_layers=2)
    return load_model(name, dtype=dtype, device="cpu")


@needs_compiler
@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_logits_are_the_models_own(family: str, dtype: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, family, dtype)
    step = compiled_step.obtain(model, block_size=BLOCK_SIZE, num_threads=1)
    assert step is not None
    tolerance = TOLERANCES[model.dtype]
    for lens in [
        ((0, 1),),
        ((40, 7),),
        ((0, 20), (3, 1), (11, 2)),
        tuple((i, 1) for i in range(9)),
    ]:
        expected = model.forward(make_inputs(model, lens, block_size=BLOCK_SIZE)).float()
        logits = step(make_inputs(model, lens, block_size=BLOCK_SIZE)).float()
        scale = float(expected.abs().max())
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * scale)


@needs_compiler
@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_compiled_logits_are_the_same_in_any_batch(family: str, dtype: str, tmp_path: Path) -> None:
    """A sequence's first token, alone and in steps of more tokens and sequences: bit for bit."""
    model = make_model(tmp_path, family, dtype)
    if not has_streams(model.dtype):
        pytest.skip("needs products that do not know the batch")
    step = compiled_step.obtain(model, block_size=BLOCK_SIZE, num_threads=1)
    assert step is not None
    first_rows = [
        step(make_inputs(model, lens, block_size=BLOCK_SIZE))[0]
        for lens in (((40, 1),), ((40, 7),), ((40, 3), (3, 1), (11, 2)), ((40, 1),) * 9)
    ]
    for row in first_rows[1:]:
        assert torch.equal(row, first_rows[0])


@needs_compiler
def test_models_of_a_shape_share_a_library_and_keep_their_weights(tmp_path: Path) -> None:
    """It is loaded from where it was compiled to: a copy that is made for a process would stay when
    that process is killed."""
    names = [save_model(tmp_path / str(seed), seed=seed, num_hidden_layers=2) for seed in range(2)]
    models = [load_model(name, dtype="float32", device="cpu") for name in names]
    steps = [compiled_step.obtain(model, block_size=BLOCK_SIZE, num_threads=1) for model in models]
    mapped = Path("/proc/self/maps").read_text()
    assert f"/{compiled_step.LIBRARY}\n" in mapped
    assert "aotinductor_" not in mapped  # torch's folders of such copies
    for model, step in zip(models, steps, strict=True):
        assert step is not None
        logits, expected = (
            forward(make_inputs(model, step_probe.EXAMPLE, block_size=BLOCK_SIZE))
            for forward in (step, model.forward)
        )
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@needs_compiler
def test_layers_without_attention_are_counted(tmp_path: Path) -> None:
    """What is compiled knows attention layers by their numbers among all."""
    kinds = ["mlp", "full_attention", "mlp", "full_attention"]
    name = save_model(tmp_path, "nemotron_h", layers_block_type=kinds)
    model = load_model(name, dtype="float32", device="cpu")
    inputs = make_inputs(model, step_probe.EXAMPLE, block_size=BLOCK_SIZE)
    step = StepModule.of(model, inputs.attention.layers.values())
    expected = model.forward(make_inputs(model, step_probe.EXAMPLE, block_size=BLOCK_SIZE))
    with torch.inference_mode():
        torch.testing.assert_close(step(*compiled_step.step_tensors(inputs)), expected)


@needs_compiler
def test_a_worker_switches_between_steps_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compiled forward serves all weights of a shape, and a running sequence goes on.

    One of the first layers drafts beside it.
    """
    used: set[CompiledStep] = set()
    run = CompiledStep.__call__

    def note_and_run(step: CompiledStep, inputs: StepInputs) -> torch.Tensor:
        used.add(step)
        return run(step, inputs)

    monkeypatch.setattr(CompiledStep, "__call__", note_and_run)
    plain = Target(make_model(tmp_path), CACHE)
    target = Target(make_model(tmp_path), CACHE, early_exit_layer=1)
    target.start_compiling().join()
    used.clear()  # by probes
    for seed in range(2):
        prompt = make_prompt(seed, 10 + 14 * seed)
        for sampling in (GREEDY, SAMPLED):
            expected = generate(plain, prompt, 24, sampling=sampling)
            assert generate(target, prompt, 24, sampling=sampling) == expected
            drafted = generate(target, prompt, 24, sampling=sampling, drafts=random_drafts(3, seed))
            assert drafted == expected
            assert generate(target, prompt, 24, sampling=sampling, next_k=3) == expected
    assert len(used) == 2  # of all layers, and of the first


@needs_compiler
@pytest.mark.parametrize("error", [1.0, float("nan")])
@pytest.mark.usefixtures("empty_cache")
def test_what_differs_is_not_used(
    error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_step, "_compile", lambda _, output: output.touch())
    monkeypatch.setattr(compiled_step, "CompiledStep", lambda *_: None)
    monkeypatch.setattr(step_probe, "probe_error", lambda *_, **__: error)
    target = Target(make_model(tmp_path / "model"), CACHE)
    target.start_compiling().join()
    assert not target.is_compiled
    assert f"is off by {error:.3g}: not used" in caplog.text


@needs_compiler
def test_a_spoilt_library_is_not_used(
    empty_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def spoil(_: object, output: Path) -> None:
        output.mkdir()
        (output / compiled_step.LIBRARY).write_bytes(b"no library")

    monkeypatch.setattr(compiled_step, "_compile", spoil)
    target = Target(make_model(tmp_path / "model"), CACHE)
    target.start_compiling().join()
    assert len(forwards(empty_cache)) == 1
    assert "is not compiled, so it is slower" in caplog.text
    assert generate(target, make_prompt(1, 10), 10)


@needs_compiler
@pytest.mark.skipif(not has_streams(torch.bfloat16), reason="weights are laid out in one way only")
def test_a_forward_of_weights_laid_out_otherwise_is_not_taken(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_step, "_compile", lambda _, output: output.touch())
    for streams in (True, False):
        monkeypatch.setattr(packed_linear, "has_streams", lambda _, streams=streams: streams)
        model = make_model(tmp_path / "model", dtype="bfloat16")
        compiled_step.obtain(model, block_size=BLOCK_SIZE, num_threads=1)
    assert len(forwards(empty_cache)) == 2


@needs_compiler
@pytest.mark.usefixtures("empty_cache")
def test_what_cannot_be_compiled_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_step, "_compile_command", lambda *_: ["false"])
    target = Target(make_model(tmp_path / "model"), CACHE)
    target.start_compiling().join()
    assert "is not compiled, so it is slower" in caplog.text
    assert generate(target, make_prompt(1, 10), 10)


@needs_compiler
@pytest.mark.usefixtures("empty_cache")
def test_a_folder_is_found_wherever_the_compiling_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And of what it says, the last line tells what is wrong."""
    name = save_model(tmp_path / "model", "llama")
    sources = []

    def command(spec: StepSpec, _: Path) -> list[str]:
        sources.append(spec.source.name)
        return ["sh", "-c", "echo 'a traceback' >&2; echo 'ValueError: no such thing' >&2; exit 1"]

    monkeypatch.setattr(compiled_step, "_compile_command", command)
    monkeypatch.chdir(tmp_path)
    model = load_model("model", dtype="float32", device="cpu")
    assert compiled_step.obtain(model, block_size=BLOCK_SIZE, num_threads=1) is None
    assert sources == [name]
    assert "it cannot be compiled: ValueError: no such thing" in caplog.text


def test_what_no_compiler_takes_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = make_model(tmp_path)
    monkeypatch.setattr("workers.model.CpuKernel.find", lambda *_, **__: None)
    assert compiled_step.obtain(model, block_size=BLOCK_SIZE, num_threads=1) is None
    assert "is not compiled: only our fused attention" in caplog.text


@needs_compiler
def test_a_kept_forward_is_loaded_however_little_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a replica that is started again would give other texts than the one before."""
    for available in (2**40, 0):
        free = SimpleNamespace(available=available)
        monkeypatch.setattr(compiled_step.psutil, "virtual_memory", lambda free=free: free)
        target = Target(make_model(tmp_path), CacheOptions(block_size=4, kv_cache_gib=0.01))
        target.start_compiling().join()
        assert target.is_compiled
        assert target.warnings == ()


@needs_compiler
@pytest.mark.usefixtures("empty_cache")
def test_nothing_is_compiled_without_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target(make_model(tmp_path / "model"), CACHE)
    free = SimpleNamespace(available=1000)
    monkeypatch.setattr(compiled_step.psutil, "virtual_memory", lambda: free)
    target.start_compiling().join()
    assert not target.is_compiled
    assert "is not compiled, so it is slower: compiling needs" in caplog.text
    assert "has no compiled forward here" in target.warnings[0]
