"""The README's tables and tree against the source."""

import re
from pathlib import Path

import pytest

from deployments import AppArgs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_option_stands_in_the_table_with_its_default() -> None:
    section = README.split("## Serving your own models")[1].split("###")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", section, re.MULTILINE))
    assert rows == {
        name: "none" if field.default is None else str(field.default)
        for name, field in AppArgs.model_fields.items()
    }


def listed_paths() -> set[str]:
    tree = README.split("### The tree")[1].split("```")[1]
    folders: list[str] = []
    paths = set()
    for line in tree.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders = folders[:depth]
        paths.add("/".join([*folders, name.rstrip("/")]))
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
    return paths


def test_the_tree_lists_what_is_there() -> None:
    listed = listed_paths()
    assert [path for path in listed if not (ROOT / path).exists()] == []
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("deployments", "workers", "cluster", "tandem")
        for path in (ROOT / package).rglob("*.py")
        if not path.name.startswith("tandem_pb2") and path.read_text().count("\n") > 3
    }
    unlisted = {m for m in modules - listed if not m.endswith("__init__.py")}
    assert unlisted == set()


@pytest.mark.parametrize("command", ["install", "serve", "test", "check", "bench", "test-gpu"])
def test_the_commands_are_targets_of_the_makefile(command: str) -> None:
    assert f"make {command}" in README
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
