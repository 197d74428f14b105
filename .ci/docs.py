"""Writes the tables of the docs that mirror the source: `make docs`, or `--check` to compare only.

A table stands between `<!-- generated:NAME -->` and `<!-- end -->` in a Markdown file, and NAME is
one of TABLES.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cluster.options import AppArgs  # noqa: E402
from deployments.api.errors import HTTP_ERRORS, grpc_code, http_error  # noqa: E402
from deployments.api.openai import CompletionRequest  # noqa: E402
from tests.tiny_models import RARE, SUPPORTED  # noqa: E402
from workers.errors import __doc__ as tree_of_errors  # noqa: E402

PACKAGES = ("tandem", "deployments", "cluster", "workers")
MARKED = re.compile(r"(<!-- generated:(\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def options() -> str:
    """The app's options: name, default, meaning."""
    return table(
        ("option", "default", "meaning"),
        (
            (f"`{name}`", code(field.default), one_line(field.description))
            for name, field in AppArgs.model_fields.items()
        ),
    )


def request_fields() -> str:
    """The fields of a completion request: name, values, default, meaning."""
    fields = CompletionRequest.model_json_schema()["properties"]
    return table(
        ("field", "values", "default", "meaning"),
        (
            (f"`{name}`", values_of(schema), code(schema.get("default")),
             one_line(schema.get("description")))
            for name, schema in fields.items()
        ),
    )  # fmt: skip


def metrics() -> str:
    """The app's metrics: name, kind, labels, meaning, as `deployments/metrics.py` makes them."""
    source = (ROOT / "deployments/metrics.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = []
    for call in sorted(calls, key=lambda call: call.lineno):
        kind = call.func.id if isinstance(call.func, ast.Name) else ""
        if kind in ("Counter", "Gauge", "Histogram"):
            name, meaning = (ast.literal_eval(argument) for argument in call.args[:2])
            labels = [ast.literal_eval(k.value) for k in call.keywords if k.arg == "tag_keys"]
            shown = ", ".join(f"`{label}`" for label in chain(*labels))
            found.append((f"`{name}`", kind.lower(), shown, meaning))
    return table(("metric", "kind", "labels", "meaning"), found)


def errors() -> str:
    """Every error that a client can see: HTTP status, code and type, gRPC code, meaning, class."""
    meanings = dict(re.findall(r"^ *(\w+Error) {2,}(.+)$", tree_of_errors or "", re.MULTILINE))
    rows = []
    for kind, _ in HTTP_ERRORS:
        error = kind.__new__(kind)
        entry = http_error(error)
        meaning = meanings.get(kind.__name__, "anything else: a defect of ours")
        rows.append(
            (str(entry.status), code(entry.code), f"`{entry.type}`", f"`{grpc_code(error).name}`",
             meaning, f"`{kind.__name__}`")
        )  # fmt: skip
    return table(("HTTP", "code", "type", "gRPC", "meaning", "class"), rows)


def models() -> str:
    """The model types that the test suite runs."""
    return ", ".join(f"`{name}`" for name in sorted({*SUPPORTED, *RARE})) + ".\n"


def tree() -> str:
    """Every module with the first sentence of its docstring."""
    lines = list(chain.from_iterable(entries(ROOT / package, 0) for package in PACKAGES))
    return "\n".join(["```", *lines, "```"]) + "\n"


def entries(folder: Path, depth: int) -> Iterator[str]:
    """The lines of a folder: itself, its modules, its folders."""
    yield entry(f"{folder.name}/", depth, folder / "__init__.py")
    modules = sorted(folder.glob("*.py"))
    for module in modules:
        if module.name != "__init__.py" and not module.name.startswith("tandem_pb2"):
            yield entry(module.name, depth + 1, module)
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        yield from entries(inner, depth + 1)


def entry(name: str, depth: int, module: Path) -> str:
    """A line of the tree."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    first = one_line(docstring.partition("\n\n")[0])
    sentence = re.split(r"(?<=\.) ", first)[0].removesuffix(".")
    return f"{'  ' * depth}{name:<{30 - 2 * depth}}{sentence}".rstrip()


def values_of(schema: dict[str, Any]) -> str:
    """What a field of a JSON schema may be."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    names = dict.fromkeys(kind.get("type") or kind["$ref"].rpartition("/")[2] for kind in kinds)
    limits = {**schema, **(kinds[0] if len(kinds) == 1 else {})}
    parts = [" or ".join(names)]
    for key, words in (
        ("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"),
        ("maxLength", "characters: at most"), ("maxItems", "items: at most"),
    ):  # fmt: skip
        if key in limits:
            is_small = abs(limits[key]) < 1e6
            parts.append(f"{words} {limits[key]:g}" if is_small else "of 64 bits")
    return ", ".join(dict.fromkeys(parts))


def code(value: object) -> str:
    """A default as code; empty where there is none."""
    return "" if value is None else f"`{value}`"


def one_line(text: str | None) -> str:
    """A docstring as a table's cell."""
    return " ".join((text or "").split())


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; raises ValueError for one without rows."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    if not lines:
        raise ValueError(f"there is nothing to show in the table of {header[0]}")
    return (
        "\n".join(
            [
                f"| {' | '.join(header)} |",
                f"|{' --- |' * len(header)}",
                *(f"| {x} |" for x in lines),
            ]
        )
        + "\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    "options": options, "request_fields": request_fields, "metrics": metrics,
    "errors": errors, "models": models, "tree": tree,
}  # fmt: skip


def generated(text: str) -> str:
    """A page with its tables as the source has them now; raises KeyError for an unknown table."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[4]}", text)


def pages() -> list[Path]:
    """README.md and docs/*.md."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: list[str]) -> int:
    """Write the tables, or say which pages are stale; returns the exit status."""
    stale = [page for page in pages() if generated(page.read_text()) != page.read_text()]
    for page in stale:
        if "--check" not in arguments:
            page.write_text(generated(page.read_text()))
        sys.stdout.write(f"{page.relative_to(ROOT)}\n")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
