"""Every file of k8s/ against the CRD, Ray's schema and our own options."""

import gzip
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments import AppArgs, build
from deployments.api.grpc_proxy import SERVICER_FUNCTION
from deployments.builder import SERVE_ENVIRONMENT

ROOT = Path(__file__).parent.parent.parent
CRD = Path(__file__).parent / "ray.io_rayservices.yaml.gz"
RAY_SERVICES = sorted((ROOT / "k8s").glob("rayservice-*.yaml"))
SERVE_CONFIGS = sorted((ROOT / "k8s").glob("serve-*.yaml"))


def load(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(path.read_text())
    return manifest


def strict(schema: Any) -> Any:
    """A CRD's OpenAPI schema as JSON schema that knows no other fields."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not is_open:
        result["additionalProperties"] = False
    return result


def serve_configs() -> list[tuple[str, dict[str, Any]]]:
    plain = [(path.name, load(path)) for path in SERVE_CONFIGS]
    embedded = [
        (path.name, yaml.safe_load(load(path)["spec"]["serveConfigV2"])) for path in RAY_SERVICES
    ]
    return plain + embedded


def test_there_is_something_to_check() -> None:
    assert RAY_SERVICES
    assert SERVE_CONFIGS


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    versions = yaml.load(gzip.decompress(CRD.read_bytes()), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1"]
    schema["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = True
    return jsonschema.Draft202012Validator(strict(schema))


@pytest.mark.parametrize("path", RAY_SERVICES, ids=lambda path: path.name)
class TestAgainstTheCrd:
    def test_manifest_is_valid(
        self, path: Path, validator: jsonschema.Draft202012Validator
    ) -> None:
        errors = [
            f"{error.json_path}: {error.message}" for error in validator.iter_errors(load(path))
        ]
        assert errors == []

    @pytest.mark.parametrize(
        ("keys", "value"),
        [
            (["spec", "serveConfigV3"], "x"),
            (["spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "container"], []),
            (["spec", "rayClusterConfig", "workerGroupSpecs", 0, "replicas"], "two"),
        ],
    )
    def test_the_check_sees_a_mistake(
        self,
        keys: list[Any],
        value: object,
        path: Path,
        validator: jsonschema.Draft202012Validator,
    ) -> None:
        manifest = load(path)
        place: Any = manifest
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        assert list(validator.iter_errors(manifest))


@pytest.mark.parametrize(("name", "config"), serve_configs(), ids=lambda value: str(value)[:30])
class TestServeConfig:
    def test_config_is_rays_and_ours(self, name: str, config: dict[str, Any]) -> None:
        deploy = ServeDeploySchema.model_validate(config)
        (application,) = deploy.applications
        assert application.import_path == "deployments:app"
        AppArgs.model_validate(application.args)
        assert deploy.grpc_options.grpc_servicer_functions == [SERVICER_FUNCTION], name

    def test_serves_processes_are_as_we_would_start_them(
        self, name: str, config: dict[str, Any]
    ) -> None:
        options = ServeDeploySchema.model_validate(config).controller_options
        assert options is not None, name
        assert options.runtime_env == {"env_vars": SERVE_ENVIRONMENT}

    def test_overrides_name_deployments_that_exist(self, name: str, config: dict[str, Any]) -> None:
        deploy = ServeDeploySchema.model_validate(config)
        overridden = {override.name for override in deploy.applications[0].deployments}
        args = AppArgs.model_validate(deploy.applications[0].args)
        assert overridden <= deployment_names(build(args)), name


def deployment_names(application: Any) -> set[str]:
    """The names of the deployments of a graph: its ingress and what is bound to it."""
    bound = application._bound_deployment
    names = {bound.name}
    for argument in bound.init_args:
        if hasattr(argument, "_bound_deployment"):
            names |= deployment_names(argument)
    return names


@pytest.mark.parametrize("path", RAY_SERVICES, ids=lambda path: path.name)
class TestRayService:
    def test_versions_agree(self, path: Path) -> None:
        cluster = load(path)["spec"]["rayClusterConfig"]
        assert cluster["rayVersion"] == ray.__version__
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        images = {c["image"] for g in groups for c in g["template"]["spec"]["containers"]}
        (image,) = images
        assert image.endswith(f"ray{ray.__version__}")
        dockerfile = (ROOT / "k8s" / "Dockerfile").read_text()
        assert f"rayproject/ray:{ray.__version__}-" in dockerfile
        assert image in dockerfile

    def test_ports_of_the_config_are_open(self, path: Path) -> None:
        manifest = load(path)
        config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
        head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]
        ports = {
            port["name"]: port["containerPort"]
            for port in head["template"]["spec"]["containers"][0]["ports"]
        }
        assert ports["serve"] == config["http_options"]["port"]
        assert ports["serve-grpc"] == config["grpc_options"]["port"]

    def test_a_worker_holds_the_smallest_app(self, path: Path) -> None:
        manifest = load(path)
        config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
        wanted = sum(
            deployment["ray_actor_options"]["num_cpus"]
            for deployment in config["applications"][0]["deployments"]
        )
        (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert wanted <= int(limits["cpu"]) * group["minReplicas"]

    def test_ray_asks_for_a_token(self, path: Path) -> None:
        cluster = load(path)["spec"]["rayClusterConfig"]
        assert cluster["authOptions"] == {"mode": "token"}
        # KubeRay's rule: it has to know that this Ray can
        assert cluster["rayVersion"]

    def test_no_container_is_root_or_can_become_it(self, path: Path) -> None:
        for pod in pods(path):
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
            assert pod["spec"]["securityContext"]["runAsUser"] > 0
            for container in pod["spec"]["containers"]:
                context = container["securityContext"]
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}

    def test_pods_that_serve_are_asked_whether_they_are_ready(self, path: Path) -> None:
        manifest = load(path)
        config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
        (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        probe = group["template"]["spec"]["containers"][0]["readinessProbe"]
        assert probe["httpGet"]["port"] == config["http_options"]["port"]

    def test_a_policy_opens_the_ports_that_serve_and_no_others(self, path: Path) -> None:
        policy = load(path.with_name(path.name.replace("rayservice", "networkpolicy")))["spec"]
        assert policy["policyTypes"] == ["Ingress"]
        labels = policy["podSelector"]["matchLabels"].items()
        assert all(labels <= pod["metadata"]["labels"].items() for pod in pods(path))
        config = yaml.safe_load(load(path)["spec"]["serveConfigV2"])
        served = {config["http_options"]["port"], config["grpc_options"]["port"]}
        for rule in policy["ingress"]:
            if "from" not in rule:  # everybody
                assert {port["port"] for port in rule["ports"]} == served


def pods(path: Path) -> list[dict[str, Any]]:
    """The pod templates of a RayService."""
    cluster = load(path)["spec"]["rayClusterConfig"]
    return [g["template"] for g in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_image_has_a_user_that_is_not_root() -> None:
    lines = (ROOT / "k8s" / "Dockerfile").read_text().splitlines()
    user = [line.split()[1] for line in lines if line.startswith("USER ")][-1]
    assert int(user) > 0


def test_the_image_has_every_package() -> None:
    dockerfile = (ROOT / "k8s" / "Dockerfile").read_text()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages
    for package in packages:
        assert f"COPY --chown=ray:users {package} /tmp/tandem/{package}" in dockerfile


def test_every_documented_start_of_ray_asks_for_a_token() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "k8s").iterdir()]
    starts = [
        line
        for document in documents
        for line in document.read_text().splitlines()
        if "ray start --" in line or "serve deploy k8s" in line
    ]
    assert starts
    assert [line for line in starts if "RAY_AUTH_MODE=token" not in line] == []
