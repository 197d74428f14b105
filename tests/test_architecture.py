"""What may import what, and what the source must not hold. Run by `make check` too."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("workers", "cluster", "deployments", "tandem")
# Imports go one way: each may use itself and those before it.
ALLOWED = {
    "workers": {"workers"},
    "cluster": {"workers", "cluster"},
    "deployments": {"workers", "cluster", "deployments"},
    "tandem": {"workers", "cluster", "deployments", "tandem"},
}
MAX_LINES = 350
MAX_FUNCTION_LINES = 60


@cache
def sources(package: str) -> list[tuple[Path, ast.Module]]:
    paths = sorted((ROOT / package).rglob("*.py"))
    generated = "tandem_pb2"
    return [(p, ast.parse(p.read_text())) for p in paths if not p.name.startswith(generated)]


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    for path, tree in sources(package):
        for module in imported(tree):
            first = module.split(".")[0]
            if first in PACKAGES:
                assert first in ALLOWED[package], f"{path} imports {module}"
            assert first != "tests", f"{path} imports {module}"


def test_the_router_knows_no_wire_format() -> None:
    """Only its deployment, which is Serve's ingress, connects it to the edge."""
    for path, tree in sources("deployments/router"):
        if path.name != "deployment.py":
            assert not [m for m in imported(tree) if m.startswith("deployments.api")], path


def modules_by_name() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): tree
        for package in PACKAGES
        for path, tree in sources(package)
    }


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports within functions count too."""
    modules = modules_by_name()
    imports: dict[str, set[str]] = {}
    for name, tree in modules.items():
        found = set(imported(tree)) | {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        imports[name] = found & set(modules) - {name}
    packages = {name for name in modules if (ROOT / name.replace(".", "/")).is_dir()}
    sorter = TopologicalSorter({name: found - packages for name, found in imports.items()})
    sorter.prepare()  # raises CycleError, which names the circle


def test_workers_never_import_ray() -> None:
    for path, tree in sources("workers"):
        assert not [m for m in imported(tree) if m.split(".")[0] == "ray"], path


def test_importing_deployments_does_not_import_torch() -> None:
    """The driver and the controller import the app; only replicas need torch."""
    code = "import sys, deployments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def reads_environment(tree: ast.AST) -> bool:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names.update(alias.name for alias in node.names)
    return not names.isdisjoint({"environ", "environb", "getenv", "getenvb"})


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.environ['A']",
        "import os as system; system.getenv('A')",
        "from os import environ, path",
        "from os import getenv as get",
    ],
)
def test_reading_the_environment_is_seen(code: str) -> None:
    assert reads_environment(ast.parse(code))


def test_the_environment_is_not_read() -> None:
    """Secrets alone stand there, where no list of options shows them; one module reads them."""
    for package in PACKAGES:
        for path, tree in sources(package):
            if path != ROOT / "deployments" / "args.py":
                assert not reads_environment(tree), f"{path}: options belong in cluster/options.py"


def test_files_stay_small() -> None:
    for package in (*PACKAGES, "tests"):
        for path, _ in sources(package):
            num_lines = len(path.read_text().splitlines())
            assert num_lines <= MAX_LINES, f"{path} has {num_lines} lines"


def test_functions_stay_small() -> None:
    for package in PACKAGES:
        for path, tree in sources(package):
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or 0) - node.lineno + 1
                    assert length <= MAX_FUNCTION_LINES, f"{path}: {node.name}, {length} lines"


def test_generated_code_is_what_the_proto_says(tmp_path: Path) -> None:
    """`make proto` was run after the last change of tandem.proto."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "deployments/api/tandem.proto"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(command, cwd=ROOT, check=True)
    for name in ("tandem_pb2.py", "tandem_pb2.pyi", "tandem_pb2_grpc.py"):
        path = Path("deployments/api") / name
        assert (ROOT / path).read_text() == (tmp_path / path).read_text()


def test_no_path_of_a_machine_is_left_in_the_source() -> None:
    for package in (*PACKAGES, "tests", "k8s"):
        for path in (ROOT / package).rglob("*.py"):
            assert not re.search(r"/(root|work|home)/", path.read_text()), path
