"""What a report's rows come to: dynamic beside the best fixed gamma, and beside a static batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tandem.bench.baselines import BATCH, BATCH_SIZE, BaselineRow
from tandem.bench.report import markdown_table
from tandem.bench.rows import DYNAMIC, Gamma, Row, Setting, paired_ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRow:
    """Of settings that differ in gamma only, in tokens per second."""

    text: str
    temperature: float
    concurrency: int
    best_gamma: int
    """Of the fixed ones, 0 included."""
    best_tokens_per_s: float
    dynamic_tokens_per_s: float
    ratio: float
    """dynamic / best fixed: the median of those of the repeats."""
    ratios: tuple[float, ...]
    """Of each repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """BATCH_SIZE streams beside a static batch of as many by transformers, same run and prompts."""

    text: str
    gamma: Gamma
    tokens_per_s: float
    batch_tokens_per_s: float
    ratio: float
    """Ours / transformers'"""


def beside_best_fixed(rows: Sequence[Row]) -> list[DynamicRow]:
    """For each text, temperature and number of streams that has both kinds of gamma."""
    groups: dict[Setting, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.setting.plain, []).append(row)
    compared = []
    for setting, of_setting in groups.items():
        fixed = {r.setting.gamma: r for r in of_setting if isinstance(r.setting.gamma, int)}
        dynamic = [row for row in of_setting if row.setting.gamma == DYNAMIC]
        if not fixed or not dynamic:
            continue
        best_gamma = max(fixed, key=lambda gamma: fixed[gamma].tokens_per_s)
        best, chosen = fixed[best_gamma], dynamic[0]
        ratios = paired_ratios(chosen.tokens_per_s_of_repeats, best.tokens_per_s_of_repeats)
        compared.append(
            DynamicRow(
                text=setting.text,
                temperature=setting.temperature,
                concurrency=setting.concurrency,
                best_gamma=best_gamma,
                best_tokens_per_s=best.tokens_per_s,
                dynamic_tokens_per_s=chosen.tokens_per_s,
                ratio=median(ratios),
                ratios=ratios,
            )
        )
    return compared


def beside_static_batch(rows: Sequence[Row], baselines: Sequence[BaselineRow]) -> list[BatchRow]:
    """Every greedy row of as many streams as the batch has sequences: transformers is greedy."""
    batches = {row.text: row.tokens_per_s for row in baselines if row.name == BATCH}
    return [
        BatchRow(
            text=row.setting.text,
            gamma=row.setting.gamma,
            tokens_per_s=row.tokens_per_s,
            batch_tokens_per_s=batches[row.setting.text],
            ratio=row.tokens_per_s / batches[row.setting.text],
        )
        for row in rows
        if row.setting.concurrency == BATCH_SIZE
        and row.setting.temperature == 0
        and row.setting.text in batches
    ]


def format_dynamic(rows: Sequence[DynamicRow]) -> str:
    columns: dict[str, Callable[[DynamicRow], str]] = {
        "text": lambda row: row.text,
        "T": lambda row: f"{row.temperature:g}",
        "streams": lambda row: str(row.concurrency),
        "best fixed gamma": lambda row: str(row.best_gamma),
        "its tokens/s": lambda row: f"{row.best_tokens_per_s:.1f}",
        "dynamic tokens/s": lambda row: f"{row.dynamic_tokens_per_s:.1f}",
        "dynamic / best fixed": lambda row: f"{row.ratio:.2f}",
        "least - most": lambda row: f"{min(row.ratios):.2f} - {max(row.ratios):.2f}",
    }
    return markdown_table(columns, rows)


def format_batches(rows: Sequence[BatchRow]) -> str:
    columns: dict[str, Callable[[BatchRow], str]] = {
        "text": lambda row: row.text,
        "gamma": lambda row: str(row.gamma),
        f"tokens/s, {BATCH_SIZE} streams": lambda row: f"{row.tokens_per_s:.1f}",
        "static batch tokens/s": lambda row: f"{row.batch_tokens_per_s:.1f}",
        "beside it": lambda row: f"{row.ratio:.2f} x the static batch of {BATCH_SIZE}",
    }
    return markdown_table(columns, rows)
