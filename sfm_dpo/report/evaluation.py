"""evaluation.json as tables of text: base and trained model on the same tasks and pairs, for log, page and card."""

import math
from typing import Any

from sfm_dpo.common.files import format_table
from sfm_dpo.common.statistics import wilson

HEADINGS = ("task", "metric", "samples", "base", "trained", "difference (95%)", "verdict")
PAIR_METRICS = {  # of a row of `pairs`: its heading
    "rewards/accuracies": "reward accuracy",
    "rewards/margins": "reward margin",
    "logps/accuracies": "chosen is likelier",
    "loss": "loss",
}


def evaluation_tables(evaluation: dict[str, Any]) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    """(headings, rows) of the benchmarks and of the preference sets, those that there are."""
    benchmarks = [_format_benchmark(row) for row in evaluation.get("benchmarks", [])]
    pairs = [_format_pairs(row) for row in evaluation.get("pairs", [])]
    tables = [(HEADINGS, benchmarks), (("preference set", "pairs", *PAIR_METRICS.values()), pairs)]
    return [(headings, rows) for headings, rows in tables if rows]


def format_evaluation(evaluation: dict[str, Any]) -> str:
    """The tables as text for the terminal."""
    return "\n\n".join(format_table(rows, headings, "llrrrll") for headings, rows in evaluation_tables(evaluation))


def _format_benchmark(row: dict[str, Any]) -> list[str]:
    """After ± is the standard error."""
    metric = row["metric"] if row["filter"] == "none" else f"{row['metric']}, {row['filter']}"
    difference = f"{row['difference']:+.3f}"
    if row["low"] is not None:
        difference += f" ({row['low']:+.3f} to {row['high']:+.3f})"
    sides = []
    for side in (row["base"], row["trained"]):
        error = "" if side["stderr"] is None else f" ± {side['stderr']:.3f}"
        sides.append(f"{side['value']:.3f}{error}")
    return [row["task"], metric, str(row["samples"]), *sides, difference, row["verdict"]]


def _format_pairs(row: dict[str, Any]) -> list[str]:
    metrics = [format_metric(name, row.get(name, math.nan), row["pairs"]) for name in PAIR_METRICS]
    return [row["source"], str(row["pairs"]), *metrics]


def format_metric(name: str, value: float, pairs: int) -> str:
    """A metric of `pairs` pairs as text, a share of them with its 95% interval."""
    if name.endswith("accuracies"):
        low, high = wilson(value, pairs)
        return f"{value:.2f} ({low:.2f} to {high:.2f})"
    return f"{value:z.3f}"
