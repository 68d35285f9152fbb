"""Sweeps: a grid of recipe fields as one Slurm array of ordinary runs, and a table of them."""

import itertools
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import format_table
from sfm_dpo.config import parse_config
from sfm_dpo.run.folder import STATUS, read_mapping
from sfm_dpo.run.reader import read_run

MEMBERS = "members.txt"  # in the sweep's folder: a line of arguments for each run, which scripts/common.sh reads
GRID = "grid.yaml"  # beside it: the grid as it was submitted
SEEDS = ("seed", "data_seed")  # runs that differ in these alone have one row in the table
LOWER_IS_BETTER = re.compile("loss|perplexity|bits_per_byte|brier")


@dataclass(frozen=True)
class Grid:
    """A grid file; `fields` has the values of each swept field, `sbatch` further options of sbatch."""

    recipe: str
    output_dir: str
    fields: dict[str, list]
    rank_by: str = "eval_loss"
    at_once: int | None = None
    sbatch: str = ""


def read_grid(path: Path) -> Grid:
    """Raises UserError: the file is no grid."""
    try:
        grid = Grid(**yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError) as error:
        raise UserError(f"{path}: is no grid ({error}); give recipe, output_dir and fields") from error
    if not isinstance(grid.fields, dict):
        raise UserError(f"{path}: fields is {grid.fields!r}; give the values of each swept field")
    for name, values in grid.fields.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: fields: {name} is {values!r}; give a list of one value or more")
    return grid


def list_members(grid: Grid) -> dict[Path, dict[str, list[str]]]:
    """The product of the values: the folder of each run, named by its values, and these as words of a command line.

    Raises:
        UserError: two runs would share a folder.
    """
    members: dict[Path, dict[str, list[str]]] = {}
    for values in itertools.product(*grid.fields.values()):
        words = {name: _words(value) for name, value in zip(grid.fields, values, strict=True)}
        parts = [f"{name}={re.sub('[^A-Za-z0-9.+-]+', '-', '-'.join(texts))}" for name, texts in words.items()]
        folder = Path(grid.output_dir) / ",".join(parts)
        if folder in members:
            raise UserError(f"fields: two runs would share the folder {folder}; give each value once")
        members[folder] = words
    return members


def _words(value: Any) -> list[str]:
    """A value on a command line."""
    items = value if isinstance(value, list) else [value]
    return [item if isinstance(item, str) else json.dumps(item) for item in items]


def plan_sweep(grid: Grid) -> tuple[list[str], list[int]]:
    """The lines of MEMBERS, and the numbers of those whose runs are not done.

    Raises:
        UserError: a field or value that train_dpo.py would refuse, or a folder that holds another sweep.
    """
    lines = []
    unfinished = []
    for number, (folder, values) in enumerate(list_members(grid).items()):
        words = [word for name, texts in values.items() for word in (f"--{name}", *texts)]
        lines.append(shlex.join([grid.recipe, *words, "--output_dir", str(folder)]))
        parse_config(["--config", *shlex.split(lines[-1])], training=False)
        if read_mapping(folder / STATUS).get("state") != "done":
            unfinished.append(number)
    earlier = Path(grid.output_dir) / MEMBERS
    if earlier.is_file() and earlier.read_text().splitlines() != lines:
        raise UserError(f"output_dir {grid.output_dir}: holds another sweep; choose another")
    return lines, unfinished


@dataclass
class Setting:
    """A row of the table: the runs that differ in SEEDS alone. `metric`: `rank_by` of those that are done, by seed."""

    values: list[str]
    states: list[str] = field(default_factory=list)
    metric: dict[tuple, float] = field(default_factory=dict)


def rank_settings(grid: Grid) -> list[Setting]:
    """The settings, the best mean of `rank_by` first, those without it last."""
    settings: dict[str, Setting] = {}
    for folder, words in list_members(grid).items():
        values = [" ".join(texts) for name, texts in words.items() if name not in SEEDS]
        setting = settings.setdefault(str(values), Setting(values))
        if not (folder / STATUS).is_file():
            setting.states.append("not started")
            continue
        run = read_run(folder)
        setting.states.append(run["status"].get("state", "unknown"))
        metrics = read_metrics(run)
        if setting.states[-1] in ("done", "push_failed") and grid.rank_by in metrics:
            setting.metric[tuple(str(words.get(name)) for name in SEEDS)] = metrics[grid.rank_by]
    ranked = [setting for setting in settings.values() if setting.metric]
    ranked.sort(key=lambda setting: mean(setting.metric.values()), reverse=not LOWER_IS_BETTER.search(grid.rank_by))
    return ranked + [setting for setting in settings.values() if not setting.metric]


def read_metrics(run: dict[str, Any]) -> dict[str, float]:
    """The last value of each logged metric, and TASK/METRIC and SET/METRIC of evaluation.json."""
    metrics: dict[str, float] = {}
    for entry in run["log"]:
        metrics |= entry
    for row in run["evaluation"].get("benchmarks", []):
        metrics[f"{row['task']}/{row['metric']}"] = row["trained"]["value"]
    for row in run["evaluation"].get("pairs", []):
        metrics |= {f"{row['source']}/{name}": value for name, value in row.items()}
    return metrics


def format_sweep(grid: Grid) -> str:
    """The table. The difference to the best setting is the mean over the seeds that both have."""
    settings = rank_settings(grid)
    best = settings[0].metric
    rows = []
    for setting in settings:
        differences = [value - best[seed] for seed, value in setting.metric.items() if seed in best]
        states = [f"{setting.states.count(state)} {state}" for state in sorted(set(setting.states))]
        cells = [format_mean(list(setting.metric.values())), format_mean(differences), ", ".join(states)]
        rows.append([*setting.values, *cells])
    names = [name for name in grid.fields if name not in SEEDS]
    return format_table(rows, [*names, grid.rank_by, "to the best", "runs"], indent=0)


def format_mean(values: list[float]) -> str:
    """Mean ± standard deviation, without the latter for one value."""
    if not values:
        return "-"
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")
