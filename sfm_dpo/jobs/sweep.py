"""Sweeps: a grid of recipe fields as one Slurm array of ordinary runs, and a table of the runs."""

import itertools
import json
import math
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.files import format_table
from sfm_dpo.common.slurm import squeue_states
from sfm_dpo.config import parse_config
from sfm_dpo.run.folder import State, read_state
from sfm_dpo.run.reader import has_process, list_jobs, read_run, to_float

MEMBERS = "members.txt"  # in the sweep's folder: one line of arguments per run, for scripts/common.sh
GRID = "grid.yaml"  # in the same folder: the grid as it was submitted
SEEDS = ("seed", "data_seed")  # runs that differ only in these share a row of the table
LOWER_IS_BETTER = re.compile("loss|perplexity|bits_per_byte|brier")


@dataclass(frozen=True)
class Grid:
    recipe: str
    output_dir: str
    fields: dict[str, list]  # the values of each swept field
    rank_by: str = "eval_loss"
    at_once: int | None = None
    sbatch: str = ""  # more options of sbatch


def read_grid(path: Path) -> Grid:
    with user_input(f"{path}: not a grid", "give recipe, output_dir and fields"):
        grid = Grid(**yaml.safe_load(path.read_text()))
        shlex.split(str(grid.sbatch))
    for name in ("recipe", "output_dir", "rank_by", "sbatch"):
        if not isinstance(getattr(grid, name), str):
            raise UserError(f"{path}: {name} is {getattr(grid, name)!r}; give a text")
    if grid.at_once is not None and not (isinstance(grid.at_once, int) and grid.at_once > 0):
        raise UserError(f"{path}: at_once is {grid.at_once!r}; give a number of runs")
    if not isinstance(grid.fields, dict) or not all(isinstance(v, list) and v for v in grid.fields.values()):
        raise UserError(f"{path}: fields is {grid.fields!r}; give each swept field a list of values")
    return grid


def list_members(grid: Grid) -> dict[Path, dict[str, list[str]]]:
    """The product of the values: each run's folder, named after its values, and its values as command-line words."""
    members: dict[Path, dict[str, list[str]]] = {}
    for values in itertools.product(*grid.fields.values()):
        words: dict[str, list[str]] = {}
        for name, value in zip(grid.fields, values, strict=True):
            items = value if isinstance(value, list) else [value]
            words[name] = [to_word(item) for item in items]
        if broken := [name for name, texts in words.items() if "\n" in "".join(texts)]:
            raise UserError(f"fields: a value of {broken[0]} contains a line break; remove it")
        parts = [f"{name}={re.sub('[^A-Za-z0-9.+-]+', '-', '-'.join(texts))}" for name, texts in words.items()]
        folder = Path(grid.output_dir) / ",".join(parts)
        if folder in members:
            raise UserError(f"fields: two runs would share the folder {folder}; give each value once")
        members[folder] = words
    return members


def to_word(item: Any) -> str:
    """A value of a grid as a word of the command line, which takes an empty one for null."""
    if isinstance(item, bool | dict | list):
        return json.dumps(item, default=str)
    return "" if item is None else str(item)


def plan_sweep(grid: Grid) -> tuple[list[str], list[int]]:
    """The lines of MEMBERS and the numbers of the runs to submit: neither done, nor refused or ended by the guard,
    nor running or queued. Raises UserError as train_dpo.py would."""
    lines = []
    numbers = []
    members = list_members(grid)
    queue = squeue_states(job for folder in members for job in list_jobs(folder))
    if queue is None:
        raise UserError("squeue: Slurm does not say which of the runs it has; try again")
    for number, (folder, values) in enumerate(members.items()):
        words = [word for name, texts in values.items() for word in (f"--{name}", *texts)]
        lines.append(shlex.join([grid.recipe, *words, "--output_dir", str(folder)]))
        parse_config(["--config", *shlex.split(lines[-1])], training=False)
        is_queued = any(queue.get(job) == "PENDING" for job in list_jobs(folder))
        if read_state(folder).may_start_again and not has_process(folder, queue) and not is_queued:
            numbers.append(number)
    earlier = Path(grid.output_dir) / MEMBERS
    if earlier.is_file() and earlier.read_text().splitlines() != lines:
        raise UserError(f"output_dir {grid.output_dir}: contains another sweep; choose another folder")
    return lines, numbers


def read_metrics(run: dict[str, Any]) -> dict[str, float]:
    """The final model's value of each logged metric, of evaluation/METRIC from eval_command, and from evaluation.json
    of TASK/METRIC (its first filter), TASK/METRIC,FILTER and SET/METRIC."""
    metrics: dict[str, float] = {}
    best = run["config"].get("load_best_model_at_end") and run["status"].get("best")
    for entry in run["log"]:
        if not best or entry["step"] <= best["step"]:
            metrics |= entry
    for row in run["evaluation"].get("benchmarks", []):
        name = f"{row['task']}/{row['metric']}"
        metrics[f"{name},{row['filter']}"] = row["trained"]["value"]
        metrics.setdefault(name, row["trained"]["value"])
    for row in run["evaluation"].get("pairs", []):
        metrics |= {f"{row['source']}/{name}": value for name, value in row.items()}
    return metrics


def format_sweep(grid: Grid) -> str:
    """The table, with one row for the runs that differ only in SEEDS, ranked by how `rank_by` differs from
    the mean of the rows that have the same seed."""
    states: dict[tuple, list[str]] = {}
    metric: dict[tuple, dict[tuple, float]] = {}  # `rank_by` of the runs that are done, by seed
    for folder, words in list_members(grid).items():
        setting = tuple(" ".join(texts) for name, texts in words.items() if name not in SEEDS)
        state = read_state(folder)
        states.setdefault(setting, []).append("not started" if state is State.UNKNOWN else state)
        metric.setdefault(setting, {})
        metrics = read_metrics(read_run(folder)) if state.has_model else {}
        if math.isfinite(to_float(metrics.get(grid.rank_by))):
            metric[setting][tuple(str(words.get(name)) for name in SEEDS)] = metrics[grid.rank_by]
    sign = 1 if LOWER_IS_BETTER.search(grid.rank_by) else -1
    by_seed: dict[tuple, list[float]] = {}
    for values in metric.values():
        for seed, value in values.items():
            by_seed.setdefault(seed, []).append(value)

    def rank(setting: tuple) -> float:
        differences = [value - mean(by_seed[seed]) for seed, value in metric[setting].items()]
        return sign * mean(differences) if differences else math.inf

    ranked = sorted(metric, key=rank)
    best = metric[ranked[0]]
    rows = []
    for setting in ranked:
        values = metric[setting]
        differences = [value - best[seed] for seed, value in values.items() if seed in best]  # of the seeds of both
        counts = [f"{count} {state}" for state, count in sorted(Counter(states[setting]).items())]
        rows.append([*setting, format_mean([*values.values()]), format_mean(differences), ", ".join(counts)])
    names = [name for name in grid.fields if name not in SEEDS]
    return format_table(rows, [*names, grid.rank_by, "vs best", "runs"], indent=0)


def format_mean(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")
