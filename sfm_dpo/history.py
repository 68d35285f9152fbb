"""What did a run write down? Its files and its log, from the folder alone, whatever end it came to."""

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from sfm_dpo.errors import UserError
from sfm_dpo.redact import mask
from sfm_dpo.run_dir import DATA, ENVIRONMENT, RESOLVED_CONFIG, STATUS

_FILES = {  # name in the template: (file, type of its content)
    "config": (RESOLVED_CONFIG, dict),
    "environment": (ENVIRONMENT, dict),
    "data": (DATA, dict),
    "status": (STATUS, dict),
    "preflight": ("preflight.json", dict),
    "health": ("health.json", dict),
    "samples": ("samples.json", list),
}


def read_run(run: Path) -> dict[str, Any]:
    """What the files say: `_FILES` by name (empty where absent), `log` (log_history of the newest trainer_state.json),
    `steps`, `seconds` of training since the last start or None, `checkpoints`, `unreadable` files.

    Raises:
        UserError: `run` is no folder, or holds none of the files.
    """
    if not run.is_dir():
        raise UserError(f"{run}: no such folder")
    unreadable: list[str] = []
    facts = {name: _read(run / file, kind, unreadable) for name, (file, kind) in _FILES.items()}
    by_step = sorted(run.glob("checkpoint-*"), key=lambda p: int("0" + re.sub(r"\D", "", p.name)))
    found = [_read(folder / "trainer_state.json", dict, unreadable) for folder in (run, *by_step)]
    state = max(
        found, key=lambda s: s.get("global_step", -1)
    )  # the last step wins: a killed run wrote checkpoints only
    if not any(facts.values()) and not state:
        raise UserError(f"{run}: not a run's folder: it holds none of {', '.join(f for f, _ in _FILES.values())}")
    log = [entry for entry in state.get("log_history", []) if isinstance(entry.get("step"), int)]
    closing = [entry["train_runtime"] for entry in log if "train_runtime" in entry]
    return facts | {
        "log": log,
        "steps": max(state.get("global_step", 0), facts["status"].get("step") or 0),
        "seconds": closing[-1] if closing else None,
        "checkpoints": [folder.name for folder in by_step],
        "unreadable": unreadable,
    }


def evaluations(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of held-out evaluations, in order."""
    return [entry for entry in log if "eval_loss" in entry]


def restarts(facts: dict[str, Any]) -> list[int]:
    """Steps at which the run was started again, from the list of starts in environment.json."""
    starts = facts["environment"].get("starts") or []
    return list(dict.fromkeys(start["step"] for start in starts[1:]))


def first_and_last(log: list[dict[str, Any]], metric: str) -> tuple[float | None, float | None]:
    """First logged value and mean of the last tenth of the logged values; finite ones only."""
    values = [v for v in (number(entry[metric]) for entry in log if metric in entry) if math.isfinite(v)]
    tail = values[-max(1, len(values) // 10) :]
    return (values[0], sum(tail) / len(tail)) if values else (None, None)


def number(value: Any) -> float:
    """A logged value as a float; NaN if it is no number."""
    return float(value) if isinstance(value, int | float) else math.nan


def _read(path: Path, kind: type, unreadable: list[str]) -> Any:
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
