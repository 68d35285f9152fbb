"""How do all runs stand? One line a run, from its folder alone and from squeue where there is one."""

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from sfm_dpo.checkpoint import newest_checkpoint
from sfm_dpo.errors import UserError
from sfm_dpo.run_dir import ENVIRONMENT, STATUS

STALE_SECONDS = 1800  # longer than a step, an evaluation or a save takes
COLUMNS = "run state slurm step eta pairs/s loss margin health last checkpoint starts".split()


def find_runs(folders: Iterable[str | Path]) -> list[Path]:
    """The given folders that are runs, and the runs directly or one deeper inside the others, by name."""
    found = []
    for folder in map(Path, folders):
        found += [folder] if _is_run(folder) else [p for p in [*folder.glob("*"), *folder.glob("*/*")] if _is_run(p)]
    return sorted(set(found))


def read_run(run: Path, queue: dict[str, str] | None, now: float) -> dict[str, Any]:
    """What is known about a run. Missing facts are None.

    Args:
        queue: Slurm's state of each job of ours (squeue_states), None without Slurm.
        now: Unix time, from which ages are counted.
    """
    status, environment, health = (_read(run / name) for name in (STATUS, ENVIRONMENT, "health.json"))
    job = status.get("job")
    slurm = None if queue is None or job is None else queue.get(job, "not queued")
    log = newest_log(job)
    times = [path.stat().st_mtime for path in (run / STATUS, log) if path is not None and path.exists()]
    age = max(0.0, now - max(times)) if times else None
    state = status.get("state", "unknown")
    if state == "running":
        gone = slurm == "not queued" or (job is None and not _is_alive(status, environment))
        state = "died" if gone else "stale" if age is not None and age > STALE_SECONDS else state
    elif slurm == "PENDING":
        state += ", waits"
    checkpoint, skipped = newest_checkpoint(run)
    return {
        "run": str(run),
        "state": "DONE" if state == "done" else state,
        "message": status.get("message") or None,
        "job": job,
        "slurm": slurm,
        "step": status.get("step"),
        "max_steps": status.get("max_steps"),
        "eta_seconds": status.get("eta_seconds") if state == "running" else None,
        **{name: status.get(name) for name in ("pairs_per_second", "loss", "margin")},
        "health": health.get("verdict"),
        "seconds_since_update": age and round(age),
        "checkpoint": checkpoint and checkpoint.name,
        "incomplete_checkpoints": len(skipped),
        "starts": len(environment.get("starts", [])) or None,
    }


def check_not_running(run: str | Path) -> None:
    """Raises UserError if another job, or another process on this node, is known to be training in this folder."""
    status, environment = _read(Path(run) / STATUS), _read(Path(run) / ENVIRONMENT)
    job, who = status.get("job"), None
    if status.get("state") != "running":
        return
    if job is not None and job != os.environ.get("SLURM_JOB_ID"):
        who = f"job {job}" if (squeue_states() or {}).get(job, "PENDING") != "PENDING" else None
    elif status.get("pid") and environment.get("starts", [{}])[-1].get("host") == platform.node():
        if not _is_alive(status, environment):
            return
        who = f"process {status['pid']}"
    if who:
        raise UserError(f"output_dir {run}: {who} is training in it; wait, end it, or choose another output_dir")


def newest_log(job: str | None) -> Path | None:
    """The log of a Slurm job, where the batch scripts put it."""
    found = list(Path("logs").glob(f"*-{job}.out")) if job else []
    return found[0] if found else None


def squeue_states() -> dict[str, str] | None:
    """Slurm's state of each of our jobs in the queue; None where there is no Slurm, or it does not answer."""
    if shutil.which("squeue") is None:
        return None
    try:
        command = ["squeue", "--me", "--noheader", "--format=%A %T"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else None


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as text, a line each, and below it what those that did not end well have said."""
    rows = [COLUMNS, *map(_cells, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"{run['run']}: {run['message']}" for run in runs if run["message"] and run["state"] != "DONE"]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _cells(run: dict[str, Any]) -> list[str]:
    def shown(name: str, form: str) -> str:
        return "-" if run[name] is None else format(run[name], form)

    step = shown("step", "d") + (f"/{run['max_steps']}" if run["max_steps"] else "")
    return [
        run["run"],
        run["state"],
        run["slurm"] or "-",
        step,
        "-" if run["eta_seconds"] is None else clock(run["eta_seconds"]),
        shown("pairs_per_second", ".2f"),
        shown("loss", ".4f"),
        shown("margin", "+.3f"),
        run["health"] or "-",
        "-" if run["seconds_since_update"] is None else f"{clock(run['seconds_since_update'])} ago",
        (run["checkpoint"] or "-") + (f" (+{n} incomplete)" if (n := run["incomplete_checkpoints"]) else ""),
        shown("starts", "d"),
    ]


def _is_run(folder: Path) -> bool:
    return (folder / STATUS).is_file()


def _is_alive(status: dict[str, Any], environment: dict[str, Any]) -> bool:
    """Whether the process that wrote the status still runs; where it is another machine's, we cannot know."""
    starts = environment.get("starts") or [{}]
    if starts[-1].get("host") != platform.node() or not status.get("pid"):
        return True
    try:
        started = psutil.Process(status["pid"]).create_time()
    except psutil.NoSuchProcess:
        return False
    return started <= datetime.fromisoformat(status["time"]).timestamp() + 1  # not another one of that number


def _read(path: Path) -> dict[str, Any]:
    """A JSON mapping, empty where there is none (a run's first seconds), or none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_all(folders: Iterable[str | Path]) -> list[dict[str, Any]]:
    queue = squeue_states()
    return [read_run(run, queue, time.time()) for run in find_runs(folders)]


def clock(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
