"""lm-evaluation-harness: log likelihoods by its `local-completions` (echo and logprobs)."""

from pathlib import Path
from typing import Any

import pytest

from cluster import bundled
from tests.compat.conftest import MODEL, Server

pytest.importorskip("lm_eval")

CASES = [
    ("def read(path):", "\n    return path"),
    ("import os", "\nimport sys"),
    ("for index in", " range(10):"),
]
"""No context ends in a space: the harness would move it to the continuation."""


@pytest.fixture
def harness_model(server: Server) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        model=MODEL,
        base_url=f"{server.base_url}/completions",
        tokenizer=bundled.resolve(bundled.TARGET_NAME),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        max_retries=1,
    )


def test_log_likelihoods_are_those_of_transformers(server: Server, harness_model: Any) -> None:
    from lm_eval.api.instance import Instance

    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=case, idx=0) for case in CASES
    ]
    for (context, continuation), (log_likelihood, _) in zip(
        CASES, harness_model.loglikelihood(requests), strict=True
    ):
        whole = server.tokenizer.encode(context + continuation)
        context_ids = server.tokenizer.encode(context)
        expected = server.log_likelihood(context_ids, whole[len(context_ids) :])
        assert log_likelihood == pytest.approx(expected, abs=1e-3)


def test_a_task_is_generated(server: Server, harness_model: Any, tmp_path: Path) -> None:
    """A task of the harness's own kind, from a file: the whole way through `simple_evaluate`."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "import os\\nimport ", "answer": "sys"}\n' * 2)
    task = tmp_path / "local.yaml"
    task.write_text(
        "task: local_multiple_choice\n"
        "dataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\n'
        'doc_to_choice: ["sys", "zzz"]\n'
        "doc_to_target: 0\n"
        'target_delimiter: ""\n'
        "metric_list:\n  - metric: acc\n"
    )
    results = simple_evaluate(
        model=harness_model,
        tasks=["local_multiple_choice"],
        task_manager=TaskManager(include_path=str(tmp_path)),
        bootstrap_iters=0,
    )
    scores = results["results"]["local_multiple_choice"]
    context = server.tokenizer.encode("import os\nimport ")
    likelihoods = [
        server.log_likelihood(
            context, server.tokenizer.encode("import os\nimport " + choice)[len(context) :]
        )
        for choice in ("sys", "zzz")
    ]
    assert scores["acc,none"] == float(likelihoods[0] > likelihoods[1])
