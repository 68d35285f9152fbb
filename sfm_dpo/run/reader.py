"""What a run has written: the files of its folder, and its logged metrics in one form, whoever logged them."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.secrets import mask
from sfm_dpo.run.checkpoint import checkpoints
from sfm_dpo.run.folder import DATA, ENVIRONMENT, RESOLVED_CONFIG, STATUS

EVALUATION, PARENTS = "evaluation.json", "parents.json"
_FILES = {  # key in the facts: (file, type of its content)
    "config": (RESOLVED_CONFIG, dict),
    "environment": (ENVIRONMENT, dict),
    "data": (DATA, dict),
    "status": (STATUS, dict),
    "preflight": ("preflight.json", dict),
    "health": ("health.json", dict),
    "samples": ("samples.json", list),
    "evaluation": (EVALUATION, dict),
    "parents": (PARENTS, list),
}


def read_run(run: Path) -> dict[str, Any]:
    """The content of `_FILES` by key (empty where absent), `log` (log_history of the newest trainer_state.json),
    `steps`, `seconds` of training since the last start or None, `checkpoints`, `unreadable` files.

    Raises:
        UserError: `run` is not a folder, or holds none of the files.
    """
    if not run.is_dir():
        raise UserError(f"{run}: no such folder")
    unreadable: list[str] = []
    facts = {key: _read_file(run / file, kind, unreadable) for key, (file, kind) in _FILES.items()}
    by_step = checkpoints(run)
    states = [_read_file(folder / "trainer_state.json", dict, unreadable) for folder in (run, *by_step)]
    state = max(states, key=lambda s: s.get("global_step", -1))  # a killed run has only those of its checkpoints
    if not any(facts.values()) and not state:
        raise UserError(f"{run}: not a run's folder: it holds none of {', '.join(f for f, _ in _FILES.values())}")
    log = [entry for entry in state.get("log_history", []) if isinstance(entry.get("step"), int)]
    runtimes = [entry["train_runtime"] for entry in log if "train_runtime" in entry]
    return facts | {
        "log": log,
        "steps": max(state.get("global_step", 0), facts["status"].get("step") or 0),
        "seconds": runtimes[-1] if runtimes else None,
        "checkpoints": [folder.name for folder in by_step],
        "unreadable": unreadable,
    }


def eval_prefix(entry: dict[str, Any]) -> str:
    """`eval_` of the entry of a held-out evaluation, `eval_NAME_` where its set has a name, else nothing."""
    losses = [name for name in entry if name.startswith("eval_") and name.endswith("loss")]
    return min(losses, key=len, default="").removesuffix("loss")


def list_evaluations(facts: dict[str, Any], prefix: str = "eval_") -> list[dict[str, Any]]:
    """The entries of a held-out set's evaluations in order, the last being that of the weights that are the model."""
    best = facts["config"].get("load_best_model_at_end") and facts["status"].get("best")
    entries = [entry for entry in facts["log"] if f"{prefix}loss" in entry]
    return [entry for entry in entries if not best or entry["step"] <= best["step"]]


def list_restarts(facts: dict[str, Any]) -> list[int]:
    """Steps at which the run was started again, from the list of starts in environment.json."""
    starts = facts["environment"].get("starts") or []
    return list(dict.fromkeys(start["step"] for start in starts[1:]))


def first_and_last(log: list[dict[str, Any]], metric: str) -> tuple[float | None, float | None]:
    """First logged value and mean of the last tenth of the logged values; finite ones only."""
    values = [v for v in (to_float(entry[metric]) for entry in log if metric in entry) if math.isfinite(v)]
    tail = values[-max(1, len(values) // 10) :]
    return (values[0], sum(tail) / len(tail)) if values else (None, None)


def to_float(value: Any) -> float:
    """A logged value as a float; NaN where it is not a number (W&B writes NaN and infinity as text)."""
    return float(value) if isinstance(value, int | float) else math.nan


def _read_file(path: Path, kind: type, unreadable: list[str]) -> Any:
    """Content of a JSON or YAML file without secrets, empty where the file is absent or cannot be read."""
    if not path.is_file():
        return kind()
    try:
        text = mask(path.read_text())  # a report is made to be sent
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (ValueError, yaml.YAMLError):  # half-written, or not text
        content = None
    if isinstance(content, kind):
        return content
    unreadable.append(f"{path.parent.name}/{path.name}")
    return kind()


@dataclass
class RunLog:
    """Logged metrics by optimizer step, {step: {metric: value}}, and what the run's files say (empty where unknown).

    Metrics have the names that transformers gives them in W&B: `train/loss`, `eval/loss`, `eval/rewards/chosen`; but
    `rewards/chosen` without `train/`. Figures about time and memory are left out.
    """

    name: str
    kind: str
    steps: dict[int, dict[str, float]]
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


def read_log(path: str | Path) -> RunLog:
    """Reads a run's folder, a `trainer_state.json`, a checkpoint, a W&B offline folder or the `.wandb` file in it.

    Raises:
        UserError: there is no run, or it has logged nothing.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.suffix == ".wandb" or (path.is_dir() and len(list(path.glob("run-*.wandb"))) == 1):
        log = _read_wandb(path)
    elif path.is_file():
        try:
            entries = list(json.loads(path.read_text())["log_history"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}: is no trainer_state.json with a log_history ({error!r})") from error
        log = RunLog(str(path), "trainer_state.json", _metrics_by_step(entries))
    else:
        facts = read_run(path)
        config, environment, data = facts["config"], facts["environment"], facts["data"]
        kind = "run" if config else "trainer_state.json"
        log = RunLog(str(path), kind, _metrics_by_step(facts["log"]), config, environment, data)
    if not log.steps:
        raise UserError(f"{path}: holds no logged step; compare a run that has trained at least logging_steps steps")
    return log


_OMITTED = ("perf/", "runtime", "per_second", "total_flos", "timestamp", "system/", "epoch", "global_step", "_step")


def _metrics_by_step(entries: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """RunLog.steps of log_history, or of W&B's rows. The closing summary, means over the whole run, is left out."""
    steps: dict[int, dict[str, float]] = {}
    for entry in entries:
        if not isinstance(entry.get("step"), int) or "train_runtime" in entry:
            continue
        for name, value in entry.items():
            if name == "step" or any(part in name for part in _OMITTED):
                continue
            name = re.sub("^eval_", "eval/", name.removeprefix("train/"))  # as transformers' callbacks rewrite them
            name = "train/loss" if name in ("loss", "train_loss") else name
            steps.setdefault(entry["step"], {})[name] = to_float(value)
    return dict(sorted(steps.items()))


def _read_wandb(path: Path) -> RunLog:
    """An offline run of W&B, read by W&B itself: `wandb leet inspect --json` prints a record a line (wandb 0.31).

    Of a file that was cut off (a killed run) it gives the whole records. The step is transformers'
    `train/global_step`, else W&B's own.
    """
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    environment = os.environ | {"WANDB_ERROR_REPORTING": "false"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    entries: list[dict] = []
    config: dict[str, Any] = {}
    for record in map(json.loads, result.stdout.splitlines()):
        if update := record.get("run", record).get("config", {}).get("update"):
            config |= {key: value for key, value in update.items() if key != "_wandb"}
        if row := record.get("history", {}).get("item"):
            entries.append(row | {"step": row.get("train/global_step", row.get("_step"))})
    if result.returncode or not entries:
        why = result.stderr or "it holds no logged metrics"
        raise UserError(f"{path}: not a W&B offline run; look into it with `wandb leet inspect {path}`: {why}")
    return RunLog(str(path), "W&B", _metrics_by_step(entries), config)
