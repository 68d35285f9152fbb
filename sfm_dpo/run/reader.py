"""What did a run write down? Its files and its log, from the folder alone, whatever end it came to."""

import json
import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.secrets import mask
from sfm_dpo.run.folder import DATA, ENVIRONMENT, RESOLVED_CONFIG, STATUS

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


_ABOUT_TIME = ("perf/", "runtime", "per_second", "total_flos", "timestamp", "system/", "epoch", "global_step", "_step")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as text in W&B's JSON
_WANDB_BLOCK = 32768


@dataclass
class RunLog:
    """`steps`: {optimizer step: {metric: value}}; the rest is empty where whoever wrote the run did not say it.

    Metrics have transformers' names, the loss is `train/loss` (W&B's name for it): `train/loss`, `rewards/chosen`,
    `eval/loss`, `eval/rewards/chosen`. Figures about time and memory are left out.
    """

    name: str
    kind: str
    steps: dict[int, dict[str, float]]
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


def read_log(path: str | Path) -> RunLog:
    """Reads a run's folder, a `trainer_state.json`, a checkpoint, a `.wandb` file or the folder that holds one.

    Raises:
        UserError: no run there, or nothing logged in it.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    wandb = [path] if path.suffix == ".wandb" else sorted(path.glob("run-*.wandb")) if path.is_dir() else []
    if len(wandb) == 1:
        log = _read_wandb(wandb[0], str(path))
    elif path.is_file():
        log = RunLog(str(path), "trainer_state.json", _by_step(_read_state(path)))
    else:
        facts = read_run(path)
        kind = "run" if facts["config"] else "trainer_state.json"
        config, environment, data = facts["config"], facts["environment"], facts["data"]
        log = RunLog(str(path), kind, _by_step(facts["log"]), config, environment, data)
    if not log.steps:
        raise UserError(f"{path}: holds no logged step; compare a run that has trained at least logging_steps steps")
    return log


def canonical(name: str) -> str | None:
    """The name of a metric in RunLog, or None for what is about time or position.

    transformers logs `loss` and `eval_loss`, its W&B callback makes `train/loss` and `eval/loss` of them.
    """
    if any(part in name for part in _ABOUT_TIME):
        return None
    side, _, rest = name.partition("/")
    if side == "train":
        name = rest
    elif name.startswith("eval_"):
        name = "eval/" + name.removeprefix("eval_")
    return "train/loss" if name in ("loss", "train_loss") else name


def _by_step(entries: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for entry in entries:
        step = entry.get("step")
        if not isinstance(step, int) or "train_runtime" in entry:  # the closing summary: means over the run
            continue
        named = [(canonical(key), value) for key, value in entry.items() if key != "step"]
        values = {name: number(value) for name, value in named if name is not None}
        if values:
            steps.setdefault(step, {}).update(values)
    return dict(sorted(steps.items()))


def _read_state(path: Path) -> list[dict[str, Any]]:
    try:
        history = json.loads(path.read_text()).get("log_history")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: is no trainer_state.json: {error}") from error
    if not isinstance(history, list):
        raise UserError(f"{path}: is no trainer_state.json: it has no log_history")
    return history


def _read_wandb(path: Path, name: str) -> RunLog:
    """A W&B offline file. The step is transformers' `train/global_step`, else W&B's own."""
    from wandb.proto.wandb_internal_pb2 import Record  # takes a second

    entries, config = [], {}
    for data in _wandb_records(path):
        record = Record()
        record.ParseFromString(data)
        updates = record.run.config.update if record.HasField("run") else record.config.update
        for item in updates:
            key = item.key or "/".join(item.nested_key)
            if key != "_wandb":  # what W&B notes for itself
                config[key] = json.loads(item.value_json)
        if record.HasField("history"):
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            row = {key: float(value) if value in _NOT_FINITE else value for key, value in row.items()}
            row["step"] = row.get("train/global_step", record.history.step.num or row.get("_step"))
            entries.append(row)
    return RunLog(name, "W&B", _by_step(entries), config)


def _wandb_records(path: Path):
    """Records of a W&B offline file: a LevelDB log behind a header of 7 bytes.

    wandb 0.31 reads it in its Go core only; its protobuf classes for the records are still Python. A file that was
    cut off (a killed run) ends with its last whole record.
    """
    blob = path.read_bytes()
    if blob[:4] != b":W&B":
        raise UserError(f"{path}: is no W&B offline file")
    position, parts = 7, []
    while position + 7 <= len(blob):
        room = _WANDB_BLOCK - position % _WANDB_BLOCK
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", blob[position : position + 7])
        position += 7
        if position + length > len(blob) or kind == 0:
            return
        parts.append(blob[position : position + length])
        position += length
        if kind in (1, 4):  # whole, or the last part of several
            yield b"".join(parts)
            parts = []
