"""The benchmarks run, on a tiny pair, and report what they measured."""

import json
from pathlib import Path

import pytest

from cluster.bench.baselines import BATCH, ONE_STREAM, Baselines
from cluster.bench.engine import STEPS, EngineOptions, run_engine_bench
from cluster.demo import bundled
from tests.tiny_models import save_model

TARGET, DRAFT = (bundled.resolve(name) for name in (bundled.TARGET_NAME, bundled.DRAFT_NAME))


@pytest.mark.parametrize("name", [*ONE_STREAM, BATCH])
def test_every_way_of_transformers_runs(name: str) -> None:
    baselines = Baselines(TARGET, DRAFT)
    prompts = ["def read(path):\n", "import os\n"]
    assert baselines.generate(name, prompts, 6) == 2 * 6


def test_engine_report_has_a_row_per_step(tmp_path: Path) -> None:
    name = save_model(tmp_path / "pair", max_position_embeddings=512, vocab_size=400)
    rows = run_engine_bench(
        EngineOptions(
            target=name,
            draft=name,
            repeats=1,
            num_threads=None,
            with_compile=False,
            output=tmp_path,
        )
    )
    assert [(row.num_sequences, row.num_tokens) for row in rows] == list(STEPS)
    assert all(
        min(row.products_s, row.transformers_s, row.target_s, row.draft_s) > 0 for row in rows
    )
    report = json.loads((tmp_path / "engine.json").read_text())
    assert len(report["rows"]) == len(STEPS)
    assert report["versions"]["torch"]
    assert (tmp_path / "engine.md").read_text().count("\n") == 2 + len(STEPS)
