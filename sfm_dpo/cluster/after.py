"""The end of a batch job: its exit code and last line, and whether Slurm starts it again.

    python -m sfm_dpo.cluster.after outputs/dpo LAUNCHER_CODE <STATUS_BEFORE

The batch scripts end with it; STATUS_BEFORE is status.json as it was before the launch. A launcher returns 0 for a run
that stopped on request and 1 for all other ends, so the run's own status.json decides. If nothing was launched,
LAUNCHER_CODE is a word of BEFORE_LAUNCH.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfm_dpo.common.errors import NODE_CHECK_FAILED, StopRequested
from sfm_dpo.common.process import ask
from sfm_dpo.common.slurm import show_job
from sfm_dpo.run.folder import ENVIRONMENT, State, array_task, read_file, read_status

# What scripts/common.sh says of a start that ended before the launch
BEFORE_LAUNCH = {"asked": StopRequested.exit_code, "unhealthy": NODE_CHECK_FAILED}
MAX_HANGS = 2  # of a job that is requeued
PATIENCE = 180.0  # seconds for which Slurm need not answer, as while its controller restarts

Status = dict[str, Any]  # the content of status.json


@dataclass(frozen=True)
class Job:
    """A start of a job that is ending."""

    id: str  # SLURM_JOB_ID
    name: str  # in Slurm's commands, which differs for a task of an array
    launcher_code: int  # before the launch: a value of BEFORE_LAUNCH
    state: str = "RUNNING"  # according to Slurm; a cancelled job is COMPLETING, and a requeue would restart it
    restarts: int = 0
    max_requeues: int = 20
    is_preempted: bool = False


@dataclass(frozen=True)
class Decision:
    exit_code: int
    last_line: str
    requeue: bool = False
    requeue_line: str = ""  # that the job is requeued, or why it is not


def choose_next(run: Path, status: Status, before: Status, environment: dict[str, Any], job: Job) -> Decision:
    """What follows from status.json now and `before` the launch, from environment.json, and from Slurm's answers."""
    end = describe_end(status, before, job)
    state = State.of(end)
    code = end["exit_code"]
    shown = "died" if state is State.RUNNING else state
    step = "" if end.get("step") is None else f"step {end['step']}, "
    message = f": {' '.join(end['message'].split())}" if end.get("message") else ""
    last_line = f"ended: state {shown}, exit code {code}, {step}{run}{message}"

    # Ctrl-C and preflight_only also leave the state stopped
    may_resume = state is State.HUNG or (state is State.STOPPED and code == StopRequested.exit_code)
    if not may_resume:
        return Decision(code, last_line)
    if reason := why_not_requeued(end, before, environment, job):
        return Decision(code, last_line, requeue_line=f"{state}, not requeued: {reason}")
    line = f"{state} and requeued (restart {job.restarts + 1} of at most {job.max_requeues})"
    if suspect := end.get("host"):  # the node of the rank that hung
        line += f"; to exclude node {suspect}, which hung: scontrol update JobId={job.name} ExcNodeList={suspect}"
    return Decision(code, last_line, requeue=True, requeue_line=line)


def describe_end(status: Status, before: Status, job: Job) -> Status:
    """status.json with this start's end, or what the launcher's exit code says if the run did not record it."""
    code = job.launcher_code
    if status != before and status.get("job") == job.id:
        if State.of(status) is not State.RUNNING:
            return status
        message = f"the processes were killed or crashed (launcher's exit code {code})"
        return status | {"exit_code": code or 1, "message": message}
    if code == StopRequested.exit_code or (code == NODE_CHECK_FAILED and job.is_preempted):
        message = "asked to stop before training began"
        return {"state": State.STOPPED, "exit_code": StopRequested.exit_code, "message": message}
    message = "the node check failed, nothing was trained" if code == NODE_CHECK_FAILED else ""
    return {"exit_code": code, "message": message}


def why_not_requeued(end: Status, before: Status, environment: dict[str, Any], job: Job) -> str | None:
    """Why a job that stopped on request or hung is not requeued, and what to do; None if it is."""
    if job.state != "RUNNING":
        return f"Slurm is ending the job ({job.state or 'no answer'}), as after scancel; resubmit to resume"
    if end.get("for_good"):
        return "stopped for good; resubmit to resume"
    if job.restarts >= job.max_requeues:
        return f"restarted {job.restarts} times, MAX_REQUEUES={job.max_requeues}; resubmit to resume"
    if State.of(end) is State.HUNG:
        hangs = sum(hang["job"] == job.id for hang in environment.get("hangs", []))
        if not end.get("checkpoint"):
            return "it has no checkpoint; resubmit to start again"
        if hangs > MAX_HANGS:
            return f"{hangs} hangs in this job; resubmit to resume from {Path(end['checkpoint']).name}"
    elif job.restarts and not job.is_preempted and not has_progressed(end, before, environment):
        return "this restart finished no step and no shard; resubmit with a longer --time"
    return None


def has_progressed(end: Status, before: Status, environment: dict[str, Any]) -> bool:
    """Whether the step is later than that of this start's beginning (the start before it may have been killed after
    its last checkpoint), or the reference cache has more shards than when the start before it stopped."""
    starts = environment.get("starts", [])
    began = starts[-1]["step"] if starts else before.get("step") or 0
    return (end.get("step") or 0, end.get("shards") or 0) > (began, before.get("shards") or 0)


def describe_job(launcher_code: int) -> Job:
    """This job, according to its environment and to Slurm's record of it."""
    # SLURM_JOB_ID of an array's task may be the array's id, by which Slurm would requeue all tasks
    name = array_task() or os.environ["SLURM_JOB_ID"]
    record = show_job(name, PATIENCE)
    preempted = record.get("PreemptTime", "None")
    return Job(
        id=os.environ["SLURM_JOB_ID"],
        name=name,
        launcher_code=launcher_code,
        state=record.get("JobState", ""),
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        max_requeues=int(os.environ.get("MAX_REQUEUES") or Job.max_requeues),
        is_preempted=preempted != "None" and preempted >= record["StartTime"],
    )


def requeue(job: str) -> bool:
    """Whether Slurm requeues the job; asked once more as soon as it answers, because the first may be no answer."""
    if ask("scontrol", "requeue", job) is None:
        show_job(job, PATIENCE)
        return ask("scontrol", "requeue", job) is not None
    return True


def say(line: str) -> None:
    print(f"[{os.environ.get('SLURM_JOB_NAME', 'dpo')} {time.strftime('%F %T')}] {line}", flush=True)


def main(argv: list[str]) -> int:
    run = Path(argv[0])
    code = BEFORE_LAUNCH.get(argv[1])
    job = describe_job(int(argv[1]) if code is None else code)
    before = read_file(Path("/dev/stdin"))
    decision = choose_next(run, read_status(run), before, read_file(run / ENVIRONMENT), job)
    if decision.requeue and not requeue(job.name):
        say("not requeued: Slurm refused; resubmit to resume")
    elif decision.requeue_line:
        say(decision.requeue_line)
    say(decision.last_line)
    return decision.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
