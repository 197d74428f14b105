"""README.md and docs/ against the source: tables, links, and the commands and options they name."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cluster.options import AppArgs
from tandem.__main__ import OTHERS
from tandem.commands import make_parser
from tandem.subjects import with_default_subject

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_README_LINES = 150
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
# Indented blocks, fenced blocks and code between backticks.
CODE = re.compile(r"^```\w*\n(.*?)^```$|^ {4}(\S[^\n]*)$|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
NO_OPTIONS = {"gama", "name"}
"""A wrong start of docs/starting.md, and the word for any option."""


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generator", ROOT / ".ci" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(page: Path) -> Iterator[str]:
    """Every line of code and every code span, continued lines joined."""
    for found in CODE.findall(page.read_text().replace("\\\n", " ")):
        for piece in found:
            yield from (line.strip() for line in piece.splitlines())


def commands(name: str) -> list[str]:
    """Every line of code of all pages that begins with the command, comments cut."""
    lines = [line for page in PAGES for line in code(page) if "->" not in line]
    return sorted({re.split(r"  +#|;", x)[0] for x in lines if f"{x} ".startswith(f"{name} ")})


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", LINK.sub(lambda x: x[0], heading).lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_tables_are_fresh(page: Path) -> None:
    """If this fails, run `make docs`."""
    assert load_generator().generated(page.read_text()) == page.read_text()


def test_every_table_stands_somewhere() -> None:
    placed = re.findall(r"<!-- generated:(\w+) -->", "".join(page.read_text() for page in PAGES))
    assert sorted(placed) == sorted(load_generator().TABLES)


def test_a_stale_table_is_seen() -> None:
    stale = "<!-- generated:options -->\n| `gama` |\n<!-- end -->"
    fresh = load_generator().generated(f"before\n{stale}\nafter\n")
    assert "| `gamma` | `dynamic` |" in fresh
    assert "gama" not in fresh
    assert fresh.startswith("before\n")
    assert fresh.endswith("<!-- end -->\nafter\n")


def test_constants_are_told_with_their_values_and_meanings(tmp_path: Path) -> None:
    module = tmp_path / "planner.py"
    module.write_text('FEW, MANY = -1, 2 * 8\n"""The bounds. More is waste."""\nName = int\n')
    assert list(load_generator().constants(module)) == [
        ("`FEW`, `MANY`", "-1, 2 * 8", "The bounds")
    ]
    module.write_text("SHARE = 0.25\n")
    with pytest.raises(ValueError, match="SHARE has no docstring"):
        list(load_generator().constants(module))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_their_anchors_exist(page: Path) -> None:
    for link in LINK.findall(CODE_BLOCK.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Files of `deployments/` and `workers/cpu/` may be named from there."""
    folders = (ROOT, ROOT / "deployments", ROOT / "workers" / "cpu")
    named = re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|cpp|h|json|yaml|proto))`", page.read_text())
    assert [n for n in named if not any((folder / n).exists() for folder in folders)] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"({p.name})" not in index] == [
        "README.md"
    ]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {command.split()[1] for command in commands("make") if " " in command}
    assert {"serve", "test", "check", "docs"} <= named
    for target in named:
        assert re.search(rf"^{target}:.*## \S", makefile, re.MULTILINE), target


def test_commands_and_their_options_exist() -> None:
    tried = [words for command in commands("tandem") if (words := _words(command))]
    assert {"bench", "chaos", "plan", "demo-train"} <= {words[0] for words in tried}
    for words in tried:
        if len(words) > 1:
            named = with_default_subject(words)
            make_parser(OTHERS, named).parse_args(named)
            continue
        with pytest.raises(SystemExit) as caught:  # only named: it has some help
            make_parser(OTHERS, words).parse_args([*words, "--help"])
        assert caught.value.code == 0, words


def _words(command: str) -> list[str]:
    """The arguments of a command; none of one that has a parser of its own, or is a pattern."""
    words = shlex.split(command.replace("<", "").replace(">", "").replace("...", ""))[1:]
    is_other = not words or words[0] in {"serve", "fuzz"} or "--help" in words
    return [] if is_other or "subject" in words or "command" in words else words


def test_options_of_the_app_exist() -> None:
    serving = commands("tandem serve") + commands("make serve") + commands("serve run")
    words = [word for command in serving for word in re.findall(r"\b([a-z]\w*)=", command)]
    words += [
        name
        for page in PAGES
        for name, value in re.findall(r"`([a-z]\w*)=(\w[^`\s]*)`", page.read_text())
        if name in AppArgs.model_fields or "_" in name
    ]
    assert {"target", "draft", "gamma", "compile"} <= {*words}
    assert {*words} - AppArgs.model_fields.keys() - NO_OPTIONS == set()
