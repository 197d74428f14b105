"""The file that `tandem plan` reads, and what it refuses."""

import logging
from pathlib import Path

import pytest
import yaml

from cluster.options import AppArgs
from cluster.plan.config import load_plan_config
from cluster.plan.planning import make_plan
from tandem.__main__ import main
from tests.cluster.plans import EIGHT_H100, LAPTOP, write
from workers.cache_size import GIB


def test_the_most_replicas_are_planned_for(tmp_path: Path) -> None:
    args = {"num_draft_replicas": "1:3", "num_target_groups": "2", "gamma": 2, "http_port": 0}
    config = load_plan_config(write(tmp_path, {"args": args, "nodes": [LAPTOP]}))
    target, draft = make_plan(config).fleet.roles
    assert (draft.num_groups, target.num_groups) == (3, 2)


def test_nodes_of_a_kind_are_numbered(tmp_path: Path) -> None:
    nodes = [{**EIGHT_H100, "count": 2}, LAPTOP]
    config = load_plan_config(write(tmp_path, {"nodes": nodes}))
    found = config.all_nodes()
    assert [node.name for node in found] == ["h100-0", "h100-1", "laptop"]
    assert found[0].kind == "h100"
    assert found[0].gpu_memory_bytes == 80 * GIB
    assert found[2].memory_bytes == 8 * GIB


def test_a_config_file_of_serve_will_do(tmp_path: Path) -> None:
    serve = yaml.safe_load((Path(__file__).parents[2] / "k8s" / "serve-demo.yaml").read_text())
    serve["applications"][0]["args"]["num_draft_replicas"] = 2
    config = load_plan_config(write(tmp_path, {**serve, "nodes": [LAPTOP]}))
    assert config.args == AppArgs(num_draft_replicas=2)


def with_applications(*applications: object) -> dict[str, object]:
    return {"applications": list(applications), "nodes": [LAPTOP]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"args": {"tensor_paralel_size": 2}, "nodes": [LAPTOP]},
            "args: there is no option 'tensor_paralel_size'; did you mean 'tensor_parallel_size'?",
        ),
        (
            {"nodes": [{**LAPTOP, "num_cpu": 2}]},
            "nodes.0: there is no field 'num_cpu'; did you mean 'num_cpus'?",
        ),
        ({"arg": {}, "nodes": [LAPTOP]}, "there is no field 'arg'; did you mean 'args'?"),
        ({"args": {"max_num_seqs": 0}, "nodes": [LAPTOP]}, "args.max_num_seqs: 0: Input should"),
        ({"args": {"device": "gpu"}, "nodes": [LAPTOP]}, "args.device: 'gpu'"),
        ({"args": {"device": "cuda"}, "nodes": [LAPTOP]}, "no node has num_gpus"),
        (
            {"args": {"num_draft_replicas": "3:1"}, "nodes": [LAPTOP]},
            "args.num_draft_replicas: 3:1 has its maximum below its minimum",
        ),
        ({"args": {"num_draft_replicas": "few"}, "nodes": [LAPTOP]}, "'few' is neither"),
        ({"args": {"target": "x/y"}, "nodes": [LAPTOP]}, "target=x/y needs a draft model"),
        ({"args": [1], "nodes": [LAPTOP]}, "args: [1]: Input should be"),
        ({"args": {}}, "it must have nodes"),
        (
            {"apiVersion": "ray.io/v1", "kind": "RayService", "spec": {}},
            "it is a RayService of Kubernetes; give what stands under its serveConfigV2",
        ),
        ({"nodes": [{"name": "a", "num_cpus": 2}]}, "nodes.0.memory_gib: is missing"),
        (
            {"nodes": [{**LAPTOP, "num_gpus": 1}]},
            "laptop has GPUs: say how large each is, by gpu_memory_gib",
        ),
        ({"nodes": [LAPTOP, LAPTOP]}, "two kinds of nodes have one name"),
        (with_applications({"import_path": "other:app"}), "0 of its applications have"),
        (with_applications({}, {}), "2 of its applications have"),
        (with_applications(3), "applications: must be a list"),
        ({**with_applications({}), "args": {}}, "both args: and applications:"),
        ("just text", "it must have args: and nodes:"),
        ("args: {", "is no YAML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    content: object, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, content)
    assert main(["plan", str(path)]) == 2
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.message.startswith(str(path))
    assert message in record.message
    assert "\n" not in record.message


def test_a_file_that_is_not_there_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["plan", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml cannot be read: No such file" in caplog.text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tensor_parallel_size": 3}, "has num_attention_heads=4, which 3 ranks cannot share"),
        ({"max_model_len": 5000}, "max_model_len is 5000, but 'tandem-demo' has positions for"),
        ({"target": "/no/such/folder", "drafter": "none"}, "there is no such folder"),
    ],
)
def test_a_model_that_cannot_be_served_so_is_refused(
    args: dict[str, object], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["plan", str(write(tmp_path, {"args": args, "nodes": [LAPTOP]}))]) == 2
    assert message in caplog.text
