"""The logged metrics of a run in one form, whoever wrote them: train_dpo.py, another HF Trainer, or W&B."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sfm_dpo.common.errors import UserError
from sfm_dpo.run.reader import read_run, to_float

_OMITTED = ("perf/", "runtime", "per_second", "total_flos", "timestamp", "system/", "epoch", "global_step", "_step")


@dataclass
class RunLog:
    """Logged metrics by optimizer step, {step: {metric: value}}, and what the run's files say (empty where unknown).

    Metrics have the names that transformers gives them in W&B: `train/loss`, `eval/loss`, `eval/rewards/chosen`; but
    `rewards/chosen` without `train/`. Metrics of time and memory are left out.
    """

    name: str
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
    if path.suffix == ".wandb" or any(path.glob("run-*.wandb")):
        log = _read_wandb(path)
    elif path.is_file():
        try:
            entries = list(json.loads(path.read_text())["log_history"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}: is no trainer_state.json with a log_history ({error!r})") from error
        log = RunLog(str(path), _metrics_by_step(entries))
    else:
        facts = read_run(path)
        steps = _metrics_by_step(facts["log"])
        log = RunLog(str(path), steps, facts["config"], facts["environment"], facts["data"])
    if not log.steps:
        raise UserError(f"{path}: holds no logged step; compare a run that has trained at least logging_steps steps")
    return log


def _metrics_by_step(entries: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """RunLog.steps of log_history, or of W&B's rows. The closing summary, means over the complete run, is left out."""
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

    Of a file that was cut off (a killed run) it gives the complete records. The step is transformers'
    `train/global_step`, else W&B's own.
    """
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    environment = os.environ | {"WANDB_ERROR_REPORTING": "false"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    entries: list[dict] = []
    config: dict[str, Any] = {}
    for line in result.stdout.splitlines():
        record = json.loads(line)
        config |= record.get("run", record).get("config", {}).get("update", {})
        if row := record.get("history", {}).get("item"):
            entries.append(row | {"step": row.get("train/global_step", row.get("_step"))})
    if result.returncode or not entries:
        why = result.stderr or "it holds no logged metrics"
        raise UserError(f"{path}: not a W&B offline run; look into it with `wandb leet inspect {path}`: {why}")
    return RunLog(str(path), _metrics_by_step(entries), config)
