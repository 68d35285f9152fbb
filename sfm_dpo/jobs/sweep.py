"""Sweeps: a grid of recipe fields as one Slurm array of ordinary runs, and the table that ranks them."""

import itertools
import json
import math
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.statistics import Z, wilson
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import parse_config
from sfm_dpo.config_checks import check_known
from sfm_dpo.report.evaluation import PAIR_FIGURES
from sfm_dpo.report.plots import draw_sweep
from sfm_dpo.run.folder import STATUS, read_mapping
from sfm_dpo.run.reader import first_and_last, read_run

# In the sweep's folder: a member's arguments a line, which scripts/common.sh reads, and the grid last submitted
MEMBERS, GRID = "members.txt", "grid.yaml"
SEEDS = ("seed", "data_seed")  # members that differ in these alone are one setting
ACCURACY, TOKENS = "eval_rewards/accuracies", "guard/answer_tokens"
_LOWER = re.compile("loss|perplexity|bits_per_byte|brier")  # metrics of which less is better
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, 97.5%, by degrees of freedom


@dataclass(frozen=True)
class Grid:
    """A grid file; `fields` has the values of each swept field, `sbatch` further options of sbatch."""

    recipe: str
    output_dir: str
    fields: dict[str, list]
    rank_by: str = "eval_loss"
    at_once: int | None = None
    sbatch: str = ""


_KINDS: dict[str, tuple[type, str]] = {
    "fields": (dict, "lists of values by field"),
    "at_once": (int, "a whole number from 1 on"),
}


def read_grid(path: Path) -> Grid:
    """Raises UserError: no such file, no YAML mapping, an unknown key, or a value that cannot be meant."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: no YAML that can be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no grid; give recipe, output_dir and fields (docs/evaluation.md)")
    for key in content:
        check_known(f"{path}:", str(key), {field.name for field in fields(Grid)})
    given: dict[str, Any] = {"recipe": None, "output_dir": None, "fields": None} | content
    for key, value in given.items():
        kind, what = _KINDS.get(key, (str, "a text"))
        if type(value) is not kind or not value or (kind is int and given[key] < 1):
            raise UserError(f"{path}: {key} is {value!r}; give {what}")
    for name, values in given["fields"].items():
        if not isinstance(values, list) or not values or None in values:
            raise UserError(f"{path}: fields: {name} is {values!r}; give a list of one value or more")
        if name in ("output_dir", "config"):
            raise UserError(f"{path}: fields: {name} cannot be swept; each member gets a folder of its own")
    return Grid(**given)


def list_members(grid: Grid) -> dict[Path, dict[str, list[str]]]:
    """The product of the values: each member's folder, named by its values, and these as words of a command line.

    Raises:
        UserError: two members would share a folder.
    """
    members: dict[Path, dict[str, list[str]]] = {}
    for values in itertools.product(*grid.fields.values()):
        words = {
            name: [_format_value(v) for v in (value if isinstance(value, list) else [value])]
            for name, value in zip(grid.fields, values, strict=True)
        }
        parts = (f"{name}={re.sub('[^A-Za-z0-9.+-]+', '-', '-'.join(texts))}" for name, texts in words.items())
        folder = Path(grid.output_dir) / ",".join(parts)
        if folder in members:
            raise UserError(f"fields: two members would be {folder}; give each value once, in words that differ")
        members[folder] = words
    return members


def _format_value(value: Any) -> str:
    """As one word; equal numbers look alike, however they are written."""
    if isinstance(value, bool | dict):
        return json.dumps(value)
    try:
        return f"{float(value):.12g}"
    except ValueError:
        return str(value)


def plan_sweep(grid: Grid) -> tuple[list[str], list[int]]:
    """The lines of MEMBERS, and the numbers of those that are not done. A line never moves: waiting tasks count on it.

    Raises:
        UserError: a field or value that train_dpo.py would refuse, or a folder that holds another sweep.
    """
    lines, members = [], list_members(grid)
    for folder, values in members.items():
        words = [word for name, texts in values.items() for word in (f"--{name}", *texts)]
        lines.append(shlex.join([grid.recipe, *words, "--output_dir", str(folder)]))
        parse_config(["--config", *shlex.split(lines[-1])], training=False)
    file = Path(grid.output_dir) / MEMBERS
    before = file.read_text().splitlines() if file.is_file() else []
    others = [line for line in before if line not in lines] or [str(m) for m in members if m.exists() and not before]
    if others:
        raise UserError(f"output_dir {grid.output_dir}: holds another sweep or run ({others[0]}); choose another")
    lines = [*before, *(line for line in lines if line not in before)]
    states = (read_mapping(Path(shlex.split(line)[-1]) / STATUS).get("state") for line in lines)
    return lines, [number for number, state in enumerate(states) if state != "done"]


def summarize_settings(grid: Grid) -> list[dict[str, Any]]:
    """A mapping for each setting (all fields but SEEDS), the best by `rank_by` first.

    `metric` and `errors`: by seed, the values of the members that are done, and their standard errors or None.

    Raises:
        UserError: no member that is done has logged `rank_by`.
    """
    settings: dict[str, dict[str, Any]] = {}
    known: set[str] = set()
    for folder, words in list_members(grid).items():
        values = {name: " ".join(texts) for name, texts in words.items() if name not in SEEDS}
        label = ", ".join(f"{name} {value}" for name, value in values.items()) or "all seeds"
        lists: dict[str, Any] = {name: [] for name in ("states", "guard", "accuracy", "drift", "tokens")}
        row = settings.setdefault(label, {"label": label, "values": values, "metric": {}, "errors": {}} | lists)
        begun = (folder / STATUS).is_file()
        run: dict[str, Any] = read_run(folder) if begun else {"status": {"state": "not started"}, "health": {}}
        row["states"].append(run["status"].get("state", "unknown"))
        row["guard"].append(run["health"].get("verdict", "-"))
        if row["states"][-1] not in ("done", "push_failed"):
            continue
        metrics = read_metrics(run)
        known |= metrics.keys()
        if math.isfinite(metrics.get(grid.rank_by, (math.nan,))[0]):
            seed = tuple(map(str, (words.get(name) for name in SEEDS)))
            row["metric"][seed], row["errors"][seed] = metrics[grid.rank_by]
        row["accuracy"] += [metrics[ACCURACY][0]] if ACCURACY in metrics else []
        first, last = first_and_last(run["log"], f"{'eval_' * ('eval_loss' in metrics)}logps/chosen")
        row["drift"] += [last - first] if first is not None and last is not None else []
        row["tokens"] += [metrics[TOKENS][0]] if TOKENS in metrics else []
    if known and grid.rank_by not in known:
        offer = ", ".join(sorted(name for name in known if name.startswith("eval_") or "/" in name))
        raise UserError(f"rank_by {grid.rank_by}: no member has it; choose one of {offer}")
    for row in settings.values():
        found = list(row["metric"].values())
        row["mean"] = float(np.mean(found)) if found else math.nan
        row["spread"] = float(np.std(found, ddof=1)) if len(found) > 1 else next(iter(row["errors"].values()), None)
    sign = 1 if _LOWER.search(grid.rank_by) else -1
    return sorted(settings.values(), key=lambda row: sign * row["mean"] if row["metric"] else math.inf)


def read_metrics(run: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Each logged metric's last value; TASK/METRIC and SET/FIGURE of evaluation.json; standard errors where known."""
    metrics: dict[str, tuple[float, float | None]] = {}
    for entry in run["log"]:
        metrics |= {name: (value, None) for name, value in entry.items() if isinstance(value, int | float)}
    if ACCURACY in metrics and (pairs := run["data"].get("eval")):
        low, high = wilson(metrics[ACCURACY][0], pairs)  # whose width is not 0 where all pairs are right
        metrics[ACCURACY] = metrics[ACCURACY][0], (high - low) / 2 / Z
    for row in run["evaluation"].get("benchmarks", []):
        metrics[f"{row['task']}/{row['metric']}"] = row["trained"]["value"], row["trained"]["stderr"]
    for row in run["evaluation"].get("pairs", []):
        found = {f"{row['source']}/{name}": row[name] for name in PAIR_FIGURES if row[name]}
        metrics |= {name: (mean, (high - low) / 2 / Z) for name, (mean, low, high) in found.items()}
    return metrics


def recommend(rows: list[dict[str, Any]], rank_by: str) -> str:
    """Which setting to take, in a sentence, or that the best differ by noise alone. A collapsed one is left out.

    Noise is the 95% interval of the difference: seed by seed (Student's t), with one seed by the standard errors.
    """
    candidates = [row for row in rows if row["metric"] and "collapsed" not in row["guard"]]
    if not candidates:
        return "Nothing to take: no setting has a member that is done and has not collapsed."
    best, *others = candidates
    name = f"{best['label']} ({rank_by} {_format_mean(best)})"
    differences = [(other["label"], *_difference(best, other)) for other in others]
    if not others:
        return f"{name} is the only setting that is done and has not collapsed."
    if unknown := [label for label, _, noise in differences if noise is None]:
        return f"{name} is the best, but one seed says nothing about noise against {unknown[0]}: sweep data_seed, too."
    if ties := [tie for tie in differences if tie[1] <= (tie[2] or 0)]:
        said = " and from ".join(
            f"{label} by {difference:.4g} ± {noise:.4g} (95%)" for label, difference, noise in ties
        )
        return f"Within noise: {name} is the best, but differs from {said}."
    return f"Take {name}: it is better than every other setting by more than noise."


def _difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, float | None]:
    """Size of the mean difference of two settings and half of its 95% interval, None where nothing tells it."""
    common = [seed for seed in a["metric"] if seed in b["metric"]]
    if len(common) > 1:
        differences = [a["metric"][seed] - b["metric"][seed] for seed in common]
        error = float(np.std(differences, ddof=1)) / math.sqrt(len(common))
        return abs(float(np.mean(differences))), _T[min(len(common) - 1, len(_T)) - 1] * error
    errors = [next(iter(row["errors"].values())) for row in (a, b)]
    return abs(a["mean"] - b["mean"]), None if None in errors else Z * math.hypot(*errors)


def _format_mean(row: dict[str, Any]) -> str:
    spread = "" if row["spread"] is None else f" ± {row['spread']:.4f}"
    return f"{row['mean']:.4f}{spread}" if row["metric"] else "-"


def format_sweep(grid: Grid) -> str:
    """The table, the sentence and the picture's path; writes sweep.png."""
    rows, cells = summarize_settings(grid), []
    for row in rows:
        figures = (
            f"{np.mean(row[key]):{form}}" if row[key] else "-"
            for key, form in (("accuracy", ".3f"), ("drift", "+.2f"), ("tokens", ".0f"))
        )
        guard = next((verdict for verdict in ("collapsed", "warned", "healthy") if verdict in row["guard"]), "-")
        states = ", ".join(f"{row['states'].count(state)} {state}" for state in sorted(set(row["states"])))
        cells.append([*row["values"].values(), _format_mean(row), *figures, guard, states])
    names = list(rows[0]["values"])
    headings = [*names, grid.rank_by, "reward accuracy", "chosen log-prob", "answer tokens", "guard", "members"]
    text = f"{format_table(cells, headings, indent=0)}\n\n{recommend(rows, grid.rank_by)}"
    if names and any(row["metric"] for row in rows):
        picture = Path(grid.output_dir) / "sweep.png"
        draw_sweep([row for row in rows if row["metric"]], grid.rank_by, picture)
        text += f"\n{picture}"
    return text
