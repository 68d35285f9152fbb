"""evaluation.json as tables of text: base and trained model on the same tasks and pairs, for log, page and card."""

from pathlib import Path
from typing import Any

from sfm_dpo.common.statistics import wilson
from sfm_dpo.common.tables import format_table
from sfm_dpo.run.folder import read_mapping
from sfm_dpo.run.reader import EVALUATION

PAIR_METRICS = {  # of a row of `pairs`: its heading
    "rewards/accuracies": "reward accuracy",
    "rewards/margins": "reward margin",
    "logps/accuracies": "chosen is likelier",
    "loss": "loss",
}
HEADINGS = ("task", "metric", "samples", "base", "trained", "difference (95%)", "verdict")


def evaluation_rows(evaluation: dict[str, Any]) -> list[list[str]]:
    """A row of HEADINGS for each metric of `evaluation`; after ± is the standard error."""
    return [
        [
            row["task"],
            _format_metric(row),
            str(row["samples"]),
            *(_format_value(row[side]) for side in ("base", "trained")),
            f"{row['difference']:+.3f}"
            + ("" if row["low"] is None else f" ({row['low']:+.3f} to {row['high']:+.3f})"),
            row["verdict"],
        ]
        for row in evaluation.get("benchmarks", [])
    ]


def pair_rows(evaluation: dict[str, Any]) -> list[list[str]]:
    """A row of (source, pairs, *PAIR_METRICS) for each preference set; a share with its 95% interval."""
    rows = []
    for row in evaluation.get("pairs", []):
        cells = [row["source"], str(row["pairs"])]
        for metric in PAIR_METRICS:
            if metric not in row:  # an evaluation of an earlier version
                cells.append("-")
            elif metric.endswith("accuracies"):
                cells.append("{:.2f} ({:.2f} to {:.2f})".format(row[metric], *wilson(row[metric], row["pairs"])))
            else:
                cells.append(f"{row[metric]:.3f}")
        rows.append(cells)
    return rows


def evaluation_tables(evaluation: dict[str, Any]) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    """(headings, rows) of the benchmarks and of the preference sets, those that there are."""
    pairs = ("preference set", "pairs", *PAIR_METRICS.values())
    tables = [(HEADINGS, evaluation_rows(evaluation)), (pairs, pair_rows(evaluation))]
    return [(headings, rows) for headings, rows in tables if rows]


def format_evaluation(evaluation: dict[str, Any]) -> str:
    """The tables as text for the terminal."""
    return "\n\n".join(format_table(rows, headings, "llrrrll") for headings, rows in evaluation_tables(evaluation))


def compare_evaluations(a: Path, b: Path) -> list[dict[str, Any]]:
    """A row for each benchmark on which both runs were evaluated, `a` and `b` being those of the trained models."""
    found = (read_mapping(run / EVALUATION).get("benchmarks", []) if run.is_dir() else [] for run in (a, b))
    of_a, of_b = ({(row["task"], _format_metric(row)): row["trained"] for row in rows} for rows in found)
    return [{"task": key[0], "metric": key[1], "a": of_a[key], "b": of_b[key]} for key in of_a if key in of_b]


def format_benchmarks(rows: list[dict[str, Any]]) -> str:
    """The rows of `compare_evaluations` as text."""
    cells = [[row["task"], row["metric"], *(_format_value(row[run]) for run in "ab")] for row in rows]
    return format_table(cells, ("benchmark", "metric", "A", "B"), "llrr", indent=0)


def _format_metric(row: dict[str, Any]) -> str:
    return row["metric"] if row["filter"] == "none" else f"{row['metric']}, {row['filter']}"


def _format_value(side: dict[str, float | None]) -> str:
    return f"{side['value']:.3f}" + ("" if side["stderr"] is None else f" ± {side['stderr']:.3f}")
