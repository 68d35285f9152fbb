"""A run's folder: its files, which a kill, a full disk or a hand may have damaged, and what its state means."""

import functools
import json
import logging
import os
import platform
import re
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sfm_dpo.common.distributed import is_main_process, share_error, world_size
from sfm_dpo.common.errors import DISK_REMEDIES, NOT_PUSHED, UserError, user_input
from sfm_dpo.common.files import PROJECT, naming, now, write_atomically, write_json
from sfm_dpo.common.process import ask
from sfm_dpo.common.secrets import mask, mask_values
from sfm_dpo.config.effects import NO_EFFECT

if TYPE_CHECKING:  # scripts/status.py reads this module without the seconds that TRL takes to import
    from sfm_dpo.config.fields import Config

log = logging.getLogger(__name__)

RESOLVED_CONFIG = "resolved_config.yaml"
ENVIRONMENT = "environment.json"
DATA = "data.json"
STATUS = "status.json"
PREFLIGHT = "preflight.json"
HEALTH = "health.json"
SAMPLES = "samples.json"
EVALUATION = "evaluation.json"
REPORT = "report.html"
CARD = "README.md"
RUN_FILES = (RESOLVED_CONFIG, ENVIRONMENT, DATA, STATUS, PREFLIGHT, HEALTH, SAMPLES, EVALUATION)
COMPLETE = "complete.json"  # in a checkpoint, and in the folder of a run whose model is saved: the list of its files
TRAINER_STATE = "trainer_state.json"  # in a run's folder and in each checkpoint
EVALUATIONS = "evaluations"  # a folder: step-N.json with what eval_command has measured, and step-N.log
COLLECTIVES = "collectives-"  # with a rank: in stacks/, the last collectives of a process group that failed or hangs
# The steps of an end after the model is saved, in the `open` of status.json
PUSHED = "pushed"
REPORTED = "reported"
EVALUATED = "evaluated"
ERROR = "error.txt"  # the traceback of an end that was reported in one line
LOG = "log.jsonl"  # entries as they are logged, from the beginning of training
STATUS_BYTES = 4096  # of status.json at least, filled with blanks, so that a full disk takes the end, too
STARTED = now()  # this process
SAID_SECONDS = 3  # after these, rank 0 has reported an end that all ranks share

_PACKAGES = "torch transformers trl accelerate deepspeed datasets peft huggingface_hub tokenizers numpy".split()
_FROM_BEFORE = "loss margin pairs_per_second trained".split()  # where the new status has none
_SLURM = "JOB_ID ARRAY_JOB_ID ARRAY_TASK_ID JOB_NAME JOB_NODELIST JOB_PARTITION CLUSTER_NAME RESTART_COUNT".split()


class State(StrEnum):
    """How a run stands, according to its status.json, and what that allows."""

    RUNNING = "running"  # or killed, since a killed run writes nothing more
    DONE = "done"
    PUSH_FAILED = "push_failed"  # trained and saved
    STOPPED = "stopped"  # on request
    REFUSED = "refused"  # by the preflight
    COLLAPSED = "collapsed"  # ended by the guard
    HUNG = "hung"  # ended by the watchdog
    FAILED = "failed"
    UNKNOWN = "unknown"  # no status.json, or a damaged one

    @classmethod
    def _missing_(cls, value: object) -> "State":
        return cls.UNKNOWN

    @classmethod
    def of(cls, status: dict[str, Any]) -> "State":
        return cls(status.get("state", cls.UNKNOWN))

    @property
    def has_model(self) -> bool:
        """Whether the folder holds the trained model."""
        return self in (State.DONE, State.PUSH_FAILED)

    @property
    def resumes(self) -> bool:
        """Whether the same command trains on, if no process of the run is left."""
        return not self.has_model and self is not State.COLLAPSED


def read_file(path: Path) -> Any:
    """The content of a run's JSON or YAML file; empty if there is no such file, and, after one warning, if it is
    damaged. Raises OSError if it cannot be read, which is no damage."""
    if path.exists():
        try:
            return read_sound_file(path, "treated as absent")
        except UserError as error:
            if isinstance(error.__cause__, PermissionError):
                raise error.__cause__ from None
            _warn_once(str(error))
    return [] if path.name == SAMPLES else {}


def read_sound_file(path: Path, remedy: str) -> Any:
    """The content of a run's file. Raises UserError with the `remedy` if the file is absent or neither JSON nor YAML,
    or does not hold a mapping, or for SAMPLES a list."""
    with user_input(f"{path}: missing or damaged", remedy), naming(path):
        text = path.read_text()
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        expected = list if path.name == SAMPLES else dict
        if not isinstance(content, expected):
            raise ValueError(f"holds a {type(content).__name__}, not a {expected.__name__}")
        return content


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def read_status(run: str | Path) -> dict[str, Any]:
    """status.json of a run; empty if there is none. COMPLETE tells that the model is saved, even if status.json could
    not be written any more."""
    status = read_file(Path(run) / STATUS)
    mark = read_file(Path(run) / COMPLETE)
    if mark and not State.of(status).has_model:
        status |= describe_end(mark.get("open", [])) | {"step": mark.get("step")}
    return status


def write_status(
    run: str | Path, state: State, code: int | None = None, message: str = "", any_rank: bool = False, **extra: Any
) -> None:
    """Writes status.json on rank 0; with `any_rank` on the rank that calls, for an end that rank 0 may not know of."""
    if not (is_main_process() or any_rank):
        return
    status = {"state": state, "exit_code": code, "message": mask(message), "step": None, "checkpoint": None}
    before = read_status(run)
    status |= {name: before.get(name) for name in _FROM_BEFORE}
    status |= {"time": now(), "job": os.environ.get("SLURM_JOB_ID"), "task": array_task(), "pid": os.getpid()}
    status |= {"log": os.environ.get("SFM_JOB_LOG")}  # scripts/common.sh
    starts = read_file(Path(run) / ENVIRONMENT).get("starts")
    if starts and starts[-1].get("time") == STARTED:  # neither a push by hand, nor a start that failed early
        status["trained"] = status["time"]
    status |= extra
    path = Path(run) / STATUS
    try:
        content = json.dumps(status, indent=2).ljust(STATUS_BYTES)
        write_atomically(path, content, durable=state != State.RUNNING)  # which is written again and again
    except OSError:  # already logged
        with suppress(OSError), path.open("r+") as file:  # on a full disk: into the old file, which has the blocks
            size = path.stat().st_size
            content = json.dumps(status).ljust(size)
            file.write(content if len(content) == size else "")


def write_end(run: Path, open_steps: list[str], message: str = "", **extra: Any) -> None:
    """Writes status.json of a run whose model is saved. The steps of its end that are still open decide the state:
    `push_failed` until its push."""
    before = read_status(run)
    of_training = {name: before[name] for name in ("step", "job", "task", "log", PUSHED) if before.get(name)}
    if State.of(before) is State.PUSH_FAILED:
        message = message or before.get("message", "")
    write_status(run, **describe_end(open_steps, message) | of_training | extra)


def describe_end(open_steps: list[str], message: str = "") -> dict[str, Any]:
    """The fields of status.json of a run whose model is saved."""
    if PUSHED not in open_steps:
        return {"state": State.DONE, "exit_code": 0, "message": "", "open": open_steps}
    message = message or "trained and saved, but not pushed yet: run the same command again"
    return {"state": State.PUSH_FAILED, "exit_code": NOT_PUSHED, "message": message, "open": open_steps}


def array_task() -> str | None:
    """The name of this task of an array in Slurm's commands, for instance 17_2; None if this job is none."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return array and f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"


def has_failed(run: str | Path) -> bool:
    """Whether a rank has recorded in status.json why this start failed."""
    with suppress(OSError):
        status = read_status(run)
        is_failure = State.of(status) in (State.REFUSED, State.COLLAPSED, State.HUNG, State.FAILED)
        return is_failure and status.get("time", "") >= STARTED
    return False


def message_of_rank(run: Path | None, error: str, is_first: bool = True) -> str | None:
    """The message this rank logs for an end with `error`, or for that of the rank that failed first; None if another
    rank logs it, and has written it into status.json or, before there is a folder, into the store."""
    if not is_main_process():
        error = f"rank {os.environ['RANK']} on {platform.node()}: {error}"
    first = share_error(error)
    if not is_main_process():
        time.sleep(SAID_SECONDS)
        if has_failed(run) if run else first != error:
            return None
    if not is_first:
        if run and has_failed(run):
            return None
        error = first
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torch's launcher quotes this file
        with suppress(OSError):  # TMPDIR may be full, too
            Path(file).write_text(json.dumps({"message": mask(error), "timestamp": int(time.time())}))
    return error


def make_folder(run: Path) -> Path:
    """Creates output_dir. Raises UserError if it is not writable."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / ".writable").touch()
        (run / ".writable").unlink(missing_ok=True)
    except OSError as error:
        remedy = f"{DISK_REMEDIES[error.errno]}, or " if error.errno in DISK_REMEDIES else ""
        what = f"output_dir {run}: cannot be written: {error.strerror}"
        raise UserError(f"{what}; {remedy}choose another output_dir") from error
    return run


def describe(config: "Config", step: int = 0) -> None:
    """Writes resolved_config.yaml, and environment.json with this start from `step`.

    The lists `starts` and `hangs` and W&B's run id are kept from earlier starts."""
    run = Path(config.train.output_dir)
    run.mkdir(parents=True, exist_ok=True)
    before = read_file(run / ENVIRONMENT)
    start = {"time": STARTED, "step": step, "host": platform.node(), "world_size": world_size()}
    start |= {"job": os.environ.get("SLURM_JOB_ID"), "restart": os.environ.get("SLURM_RESTART_COUNT")}
    starts = before.get("starts", [])
    if starts:
        starts[-1]["end"] = read_status(run).get("trained")
    history: dict[str, Any] = {"starts": [*starts, start], "hangs": before.get("hangs", [])}
    if "wandb" in config.train.report_to:  # otherwise W&B would choose another id at each start
        history["wandb_run_id"] = os.environ.get("WANDB_RUN_ID") or before.get("wandb_run_id") or secrets.token_hex(4)
        os.environ["WANDB_RUN_ID"] = history["wandb_run_id"]
        os.environ.setdefault("WANDB_RESUME", "allow")
    # Masked where no later start compares it
    values = {name: mask_values(v) if name in NO_EFFECT else v for name, v in config.as_dict().items()}
    write_atomically(run / RESOLVED_CONFIG, yaml.safe_dump(values, sort_keys=False))
    write_json(run / ENVIRONMENT, environment() | history)


def environment() -> dict[str, Any]:
    """Git commit, package versions, hardware, Slurm ids and command line of this start."""
    import torch

    git = functools.partial(ask, "git", "-C", str(PROJECT), stderr=subprocess.DEVNULL)
    return {
        "git_commit": (git("rev-parse", "HEAD") or "").strip() or None,
        "git_remote": re.sub(r"//[^/]*@", "//", git("remote", "get-url", "origin") or "").strip(),  # without a login
        "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "command": [mask(arg) for arg in (Path(sys.executable).name, *sys.argv)],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "world_size": world_size(),
        "slurm": {f"SLURM_{name}": os.environ[f"SLURM_{name}"] for name in _SLURM if f"SLURM_{name}" in os.environ},
    }
