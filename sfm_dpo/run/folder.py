"""A run's folder: claiming it, its configuration, its state.

Rank 0 alone writes. Files: resolved_config.yaml, environment.json, data.json, status.json (see docs/design.md).
"""

import dataclasses
import errno
import json
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from sfm_dpo.common.distributed import is_main_process, world_size
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import now, write_atomically
from sfm_dpo.common.secrets import mask
from sfm_dpo.run.environment import environment

if TYPE_CHECKING:  # scripts/status.py reads this module without the seconds that TRL takes to import
    from sfm_dpo.config import Config

RESOLVED_CONFIG, ENVIRONMENT, DATA, STATUS = "resolved_config.yaml", "environment.json", "data.json", "status.json"

# A run may go on with these changed: they touch neither the objective, nor the data, nor their order. Accumulation
# follows from the number of processes, about which the checkpoint has the say (checkpoint.check_resume).
MAY_DIFFER = set(
    """report_to run_name project logging_steps logging_first_step disable_tqdm log_level dataset_num_proc
    dataloader_num_workers dataloader_pin_memory push_to_hub hub_model_id hub_strategy hub_private_repo hub_revision
    hub_always_push hub_push_every save_steps save_total_limit ddp_timeout output_dir resume_from_checkpoint
    max_dropped_fraction trackio_space_id preflight preflight_samples guard guard_generations profile_steps
    ignore_resume_mismatch verify_checkpoints gradient_accumulation_steps""".split()
)


def read_status(run: str | Path) -> dict[str, Any] | None:
    """status.json of a run, or None where there is none. Raises UserError where it is damaged."""
    path = Path(run) / STATUS
    if not path.is_file():
        return None
    return _read_or_raise(path, json.loads, "state", "remove it: the run is then taken for one that has not ended")


def read_resolved_config(run: str | Path) -> dict[str, Any]:
    """resolved_config.yaml of a run. Raises UserError where it is damaged."""
    remedy = "restore it, or choose another folder"
    return _read_or_raise(Path(run) / RESOLVED_CONFIG, yaml.safe_load, "model_name_or_path", remedy)


def _read_or_raise(path: Path, parse: Callable[[str], Any], key: str, remedy: str) -> dict[str, Any]:
    try:
        content = parse(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"output_dir {path.parent}: {path.name} is damaged ({error}); {remedy}") from error
    if not isinstance(content, dict) or key not in content:
        raise UserError(f"output_dir {path.parent}: {path.name} is damaged (it does not say {key}); {remedy}")
    return content


def write_status(
    run: str | Path,
    state: str,
    exit_code: int | None = None,
    message: str = "",
    any_rank: bool = False,
    **extra: Any,
) -> None:
    """Writes status.json: `state` is running, done, stopped, refused, collapsed, failed or push_failed.

    Rank 0 writes; with `any_rank` whichever rank calls, about what rank 0 may not know.
    """
    if not (is_main_process() or any_rank):
        return
    status = {"state": state, "exit_code": exit_code, "message": mask(message), "step": None, "checkpoint": None}
    status |= extra
    status |= {"time": now(), "job": os.environ.get("SLURM_JOB_ID"), "pid": os.getpid()}
    text, path = json.dumps(status, indent=2) + "\n", Path(run) / STATUS
    try:
        write_atomically(path, text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        path.with_name(f".{STATUS}.partial").unlink(missing_ok=True)
        path.write_text(text)  # over the old one, which has its block: the verdict matters most when the disk is full


def claim(config: "Config") -> bool:
    """Decides what an existing output_dir means; makes the folder, and writes nothing into it.

    Empty or absent: a new run. The same configuration, unfinished: the run goes on. Trained to the end:
    False.

    Raises:
        UserError: the folder holds something else, which is never overwritten.
    """
    run = Path(config.train.output_dir)
    if os.path.isfile(run):
        raise UserError(f"output_dir {run}: is a file; choose another output_dir")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir {run}: cannot be written: {error.strerror}; choose another output_dir") from error
    if not os.access(run, os.W_OK | os.X_OK):
        raise UserError(f"output_dir {run}: cannot be written; check its permissions, or choose another output_dir")
    entries = [p.name for p in run.iterdir() if not p.name.startswith(".")]
    status = read_status(run)
    if not set(entries) - {STATUS, "STOP"} and (status is None or status["state"] == "failed"):
        return True  # empty, or all it holds is the mistake of an earlier start
    if not (run / RESOLVED_CONFIG).is_file():
        raise UserError(
            f"output_dir {run}: holds files of something else ({', '.join(sorted(entries)[:3])}); choose another"
        )
    now = config.as_dict()
    # A field that an earlier version did not have counts as its default, which is its old behaviour
    fields = [f for part in (config.train, config.model, config.data) for f in dataclasses.fields(part)]
    before = {f.name: f.default for f in fields} | read_resolved_config(run)
    differing = [k for k in now if k not in MAY_DIFFER and before.get(k) != now[k]]
    if differing:
        key = differing[0]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise UserError(
            f"output_dir {run}: holds another run ({key} is {before.get(key)} there, {now[key]} here{more}); choose "
            "another output_dir, or remove the folder"
        )
    if status and status["state"] == "collapsed" and config.train.guard == "stop":
        healthy = status["checkpoint"]
        start = f"from {healthy} (--resume_from_checkpoint {healthy}) " if healthy else ""
        raise UserError(
            f"output_dir {run}: the guard stopped this run; start another {start}with a lower learning_rate "
            "in another output_dir, or go on regardless with --guard warn"
        )
    return not (status and status["state"] in ("done", "push_failed"))


def describe(config: "Config", pairs: dict[str, Any], step: int = 0) -> None:
    """Writes what was asked (resolved_config.yaml), on what (data.json) and where (environment.json).

    environment.json is that of this start; its list `starts`, and the id under which W&B knows the run, are kept from
    the earlier ones. `step` is the one this start goes on from.
    """
    run = Path(config.train.output_dir)
    run.mkdir(parents=True, exist_ok=True)
    before = read_mapping(run / ENVIRONMENT)
    start = {"time": now(), "step": step, "host": platform.node(), "world_size": world_size()}
    start |= {"job": os.environ.get("SLURM_JOB_ID"), "restart": os.environ.get("SLURM_RESTART_COUNT")}
    history: dict[str, Any] = {"starts": [*before.get("starts", []), start]}
    if "wandb" in config.train.report_to:  # transformers lets W&B choose an id, another one at each start
        history["wandb_run_id"] = os.environ.get("WANDB_RUN_ID") or before.get("wandb_run_id") or secrets.token_hex(4)
        os.environ["WANDB_RUN_ID"] = history["wandb_run_id"]
        os.environ.setdefault("WANDB_RESUME", "allow")
    write_atomically(run / RESOLVED_CONFIG, yaml.safe_dump(config.as_dict(), sort_keys=False))
    write_atomically(run / DATA, json.dumps(pairs, indent=2) + "\n")
    write_atomically(run / ENVIRONMENT, json.dumps(environment() | history, indent=2) + "\n")


def add_data_facts(run: str | Path, facts: dict[str, Any]) -> None:
    """Adds to data.json what is known only once the trainer is there."""
    path = Path(run) / DATA
    write_atomically(path, json.dumps(read_mapping(path) | facts, indent=2) + "\n")


def check_not_running(run: str | Path) -> None:
    """Raises UserError if another job, or another process on this node, is known to be training in this folder."""
    status, environment = read_mapping(Path(run) / STATUS), read_mapping(Path(run) / ENVIRONMENT)
    job, who = status.get("job"), None
    if status.get("state") != "running":
        return
    if job is not None and job != os.environ.get("SLURM_JOB_ID"):
        who = f"job {job}" if (squeue_states() or {}).get(job, "PENDING") != "PENDING" else None
    elif status.get("pid") and environment.get("starts", [{}])[-1].get("host") == platform.node():
        if not is_alive(status, environment):
            return
        who = f"process {status['pid']}"
    if who:
        raise UserError(f"output_dir {run}: {who} is training in it; wait, end it, or choose another output_dir")


def squeue_states() -> dict[str, str] | None:
    """Slurm's state of each of our jobs in the queue; None where there is no Slurm, or it does not answer."""
    if shutil.which("squeue") is None:
        return None
    try:
        command = ["squeue", "--me", "--noheader", "--format=%A %T"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return dict(line.split() for line in result.stdout.splitlines()) if result.returncode == 0 else None


def is_alive(status: dict[str, Any], environment: dict[str, Any]) -> bool:
    """Whether the process that wrote the status still runs; where it is another machine's, we cannot know."""
    starts = environment.get("starts") or [{}]
    if starts[-1].get("host") != platform.node() or not status.get("pid"):
        return True
    try:
        started = psutil.Process(status["pid"]).create_time()
    except psutil.NoSuchProcess:
        return False
    return started <= datetime.fromisoformat(status["time"]).timestamp() + 1  # not another one of that number


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON mapping, empty where there is none (a run's first seconds), or none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
