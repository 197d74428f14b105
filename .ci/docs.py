"""Writes the tables of the docs that mirror the source, and those of results: `make docs`.

With `--check` they are compared only. A table stands between `<!-- generated:NAME -->` and
`<!-- end -->` in a Markdown file, and NAME is one of TABLES.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

import measured  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402

from cluster.options import AppArgs  # noqa: E402
from cluster.placement import check_tensor_parallel  # noqa: E402
from deployments.api.chat import ChatCompletionRequest  # noqa: E402
from deployments.api.completions import CompletionRequest  # noqa: E402
from deployments.api.errors import HTTP_ERRORS, grpc_code, http_error  # noqa: E402
from deployments.api.field_table import rows as field_rows  # noqa: E402
from deployments.metrics import rows as metric_rows  # noqa: E402
from deployments.router.request_log import __doc__ as request_log_table  # noqa: E402
from tests.deployments import option_pairs  # noqa: E402
from tests.deployments.combinations import TRIED, combinations  # noqa: E402
from tests.tiny_configs import SERVED  # noqa: E402
from tests.tiny_models import make_config  # noqa: E402
from workers.errors import UnsupportedModelError  # noqa: E402
from workers.errors import __doc__ as tree_of_errors  # noqa: E402
from workers.tensor_plans import add_plan  # noqa: E402

KINDS_OF_LAYERS = {
    "full_attention": "full attention",
    "sliding_attention": "sliding window",
    "chunked_attention": "chunks",
    "linear_attention": "recurrent",
    "conv": "convolution",
    "hybrid": "recurrent beside full attention",
    "mlp": "no attention",
    "moe": "no attention",
}
ROUTER = ROOT / "deployments" / "router"
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
    return table(
        ("field", "values", "default", "meaning"),
        (
            (f"`{row.name}`", row.takes, row.default, row.meaning)
            for row in field_rows(CompletionRequest)
        ),
    )


def chat_fields() -> str:
    """The fields of a chat that completions have not, or not so."""
    known = field_rows(CompletionRequest)
    return table(
        ("field", "values", "default", "meaning"),
        (
            (f"`{row.name}`", row.takes, row.default, row.meaning)
            for row in field_rows(ChatCompletionRequest)
            if row not in known
        ),
    )


def unserved_fields() -> str:
    """The fields of completions and chats that are refused unless they ask for nothing."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for requests, model in (("completions", CompletionRequest), ("chats", ChatCompletionRequest)):
        for name, field in model.unserved_fields().items():
            if name not in model.model_fields:
                row = (name, field.taken(), field.instead)
                where.setdefault(row, []).append(requests)
    return table(
        ("field", "taken", "of", "to use in its place"),
        (
            (f"`{name}`", taken, " and ".join(of), instead if " " in instead else code(instead))
            for (name, taken, instead), of in sorted(where.items())
        ),
    )


def metrics() -> str:
    """The app's metrics: name, kind, label, meaning."""
    return table(
        ("metric", "kind", "label", "meaning"),
        ((f"`{row.name}`", row.kind.value, code(row.label), row.meaning) for row in metric_rows()),
    )


def request_log() -> str:
    """The fields of a line of the log of requests."""
    return (request_log_table or "").partition("\n\n")[2].strip() + "\n"


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
    """The model types that the test suite runs, and what each of them has."""
    rows = {}
    for family in SERVED:
        config = make_config(family)
        rows[config.model_type] = (
            f"`{config.model_type}`",
            ", ".join(kinds_of_layers(config)),
            ranks(config),
        )
    return table(("model type", "layers", "groups"), (rows[name] for name in sorted(rows)))


def kinds_of_layers(config: PreTrainedConfig) -> list[str]:
    """How the layers of a model attend, or what else they do, in words."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    is_windowed = window is not None and window < text.max_position_embeddings
    default = "sliding_attention" if is_windowed else "full_attention"
    kinds = getattr(text, "layer_types", None) or [default]
    return sorted({KINDS_OF_LAYERS[kind] for kind in kinds})


def ranks(config: PreTrainedConfig) -> str:
    """Whether a group of two ranks can share a model, by whose plan."""
    plan_of_transformers = config.get_text_config().base_model_tp_plan
    add_plan(config)
    try:
        check_tensor_parallel("", config, 2)
    except UnsupportedModelError:
        return "no"
    return "yes" if plan_of_transformers else "yes, by `workers/tensor_plans.py`"


def policy_constants() -> str:
    """The numbers that decide how far to speculate: module, name, value, meaning."""
    modules = [*sorted((ROUTER / "policy").glob("*.py")), ROUTER / "drafting" / "overlap.py"]
    return table(
        ("module", "constant", "value", "meaning"),
        ((f"`{module.stem}`", *row) for module in modules for row in constants(module)),
    )


def constants(module: Path) -> Iterator[tuple[str, str, str]]:
    """The numbers that a module assigns to names in capitals: names, values, meaning.

    Raises ValueError for one without a docstring.
    """
    source = module.read_text()
    statements = ast.parse(source).body
    for node, after in zip_longest(statements, statements[1:]):
        if not isinstance(node, ast.Assign) or isinstance(node.value, ast.Call):
            continue
        names = ast.unparse(node.targets[0]).strip("()")
        if not names.isupper():  # the name of a type
            continue
        if not isinstance(after, ast.Expr):
            raise ValueError(f"{module.name}: {names} has no docstring")
        values = ast.get_source_segment(source, node.value) or ""
        meaning = first_sentence(ast.literal_eval(after.value))
        yield ", ".join(map(code, names.split(", "))), values, meaning


def what_works() -> str:
    """What the test suite tries together, each feature greedily and sampled."""
    return table(("feature", *(f"`{option}`" for option in TRIED)), combinations())


def options_together() -> str:
    """Which options are served together, and what is said of the others."""
    sentences = [
        f"{number}. `{sentence.format(target='...')}`\n"
        for number, sentence in enumerate(option_pairs.REFUSED.values(), start=1)
    ]
    return "".join([table(("", *option_pairs.OPTIONS), option_pairs.rows()), "\n", *sentences])


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
    sentence = first_sentence(ast.get_docstring(ast.parse(module.read_text())) or "")
    return f"{'  ' * depth}{name:<{30 - 2 * depth}}{sentence}".rstrip()


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring in one line, without its full stop."""
    first = one_line(docstring.partition("\n\n")[0])
    return re.split(r"(?<=\.) ", first)[0].removesuffix(".")


def code(value: object) -> str:
    """A default as code; empty where there is none."""
    return "" if value in (None, "") else f"`{value}`"


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


def gains_of_drafters(streams: int) -> str:
    """What each drafter gains, by text."""
    texts = [measured.TEXTS[text] for text in measured.TEXTS_OF_DRAFTERS]
    rows, sources = measured.gains_of_drafters(streams=streams)
    return table(("drafts by", *texts), rows) + f"\nMeasured {sources}.\n"


def gains_of_dynamic() -> str:
    """What gamma=dynamic gains, by text and streams, beside fixed lengths."""
    header = (
        "text, streams",
        "plain, tokens/s",
        "best of the fixed",
        "`gamma=dynamic`",
        "dynamic / plain",
        "the same at temperature 0.8",
        "measured on, tokens of a completion (greedy; sampled)",
    )
    rows, machines = measured.gains_of_dynamic()
    return table(header, rows) + f"\nMeasured {machines}.\n"


TABLES: dict[str, Callable[[], str]] = {
    "options": options, "request_fields": request_fields, "chat_fields": chat_fields,
    "metrics": metrics, "errors": errors, "models": models, "tree": tree,
    "request_log": request_log, "what_works": what_works, "policy_constants": policy_constants,
    "unserved_fields": unserved_fields, "options_together": options_together,
    "gains_of_drafters_1": partial(gains_of_drafters, 1), "gains_of_dynamic": gains_of_dynamic,
    "gains_of_drafters_8": partial(gains_of_drafters, 8),
    "beside_transformers": measured.beside_transformers,
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
