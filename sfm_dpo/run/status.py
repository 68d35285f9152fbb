"""The state of runs: one line a run, from its folder alone and from squeue where there is one."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sfm_dpo.common.files import format_clock, format_table
from sfm_dpo.run.checkpoint import newest_checkpoint
from sfm_dpo.run.folder import ENVIRONMENT, STATUS, read_mapping
from sfm_dpo.run.leases import LOCK, is_running, read_owner, squeue_states

STALE_SECONDS = 1800  # longer than a step, an evaluation or a save takes
COLUMNS = "run state slurm step eta pairs/s loss margin health last checkpoint starts".split()
_KEYS = {"eta": "eta_seconds", "pairs/s": "pairs_per_second", "last": "seconds_since_update"}  # of describe_run
_FORMS = {"pairs_per_second": ".2f", "loss": ".4f", "margin": "+.3f"}


def find_runs(folders: Iterable[str | Path]) -> list[Path]:
    """The given folders that are runs, and the runs directly or one deeper inside the others, by name."""
    runs: set[Path] = set()
    for folder in map(Path, folders):
        candidates = [folder] if _is_run(folder) else [*folder.glob("*"), *folder.glob("*/*")]
        runs.update(filter(_is_run, candidates))
    return sorted(runs)


def _is_run(folder: Path) -> bool:
    return (folder / STATUS).is_file()


def describe_run(run: Path, queue: dict[str, str] | None, now: float) -> dict[str, Any]:
    """What is known of a run at `now`, in Unix time, and by `queue` (of `squeue_states`); missing facts are None."""
    status = read_mapping(run / STATUS)
    job = status.get("job")
    slurm = None if queue is None or job is None else queue.get(job, "not queued")
    age = max(0.0, now - (run / STATUS).stat().st_mtime)
    state = status.get("state", "unknown")
    if state == "running":
        if is_running(read_owner(run / LOCK), queue) is False:
            state = "died"
        elif age > STALE_SECONDS:
            state = "stale"
    if slurm == "PENDING":
        state += ", waits"
    checkpoint = newest_checkpoint(run)
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
        "health": read_mapping(run / "health.json").get("verdict"),
        "seconds_since_update": round(age),
        "checkpoint": checkpoint and checkpoint.name,
        "starts": len(read_mapping(run / ENVIRONMENT).get("starts", [])) or None,
    }


def describe_runs(folders: Iterable[str | Path]) -> list[dict[str, Any]]:
    queue = squeue_states()
    return [describe_run(run, queue, time.time()) for run in find_runs(folders)]


def format_runs(runs: list[dict[str, Any]]) -> str:
    """The runs as text, a line each, and below it what those that did not end well have said."""
    cells = [[_format_cell(run, _KEYS.get(name, name)) for name in COLUMNS] for run in runs]
    lines = [format_table(cells, COLUMNS, indent=0)]
    notes = [f"{run['run']}: {run['message']}" for run in runs if run["message"] and run["state"] != "DONE"]
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


def _format_cell(run: dict[str, Any], key: str) -> str:
    value = run[key]
    if value is None:
        return "-"
    if key == "step" and run["max_steps"]:
        return f"{value}/{run['max_steps']}"
    if "seconds" in key.split("_"):
        return format_clock(value)
    return format(value, _FORMS.get(key, ""))
