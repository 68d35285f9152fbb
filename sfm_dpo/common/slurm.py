"""Slurm's commands, and what they say about jobs."""

import os
import subprocess
import time
from collections.abc import Iterable
from typing import Any

from sfm_dpo.common.process import ask, is_alive

POLL_SECONDS = 2.0


def squeue_states(jobs: Iterable[str | None]) -> dict[str, str] | None:
    """Slurm's state of each of the jobs and tasks of arrays (17_2) that is in its queue; None without Slurm, or if it
    does not answer."""
    given = ",".join(sorted(set(filter(None, jobs))))
    if not given:
        return {}
    # Given twice, because one unknown job alone is an error of squeue
    words = ["squeue", "--noheader", "--array", f"--jobs={given},{given}", "--format=%T %A %F_%K"]
    answer = ask(*words, stderr=subprocess.DEVNULL)
    states: dict[str, str] = {}
    for state, job, task in map(str.split, (answer or "").splitlines()):
        states |= {job: state, task: state}
    return None if answer is None else states


def is_running(owner: dict[str, Any], queue: dict[str, str] | None) -> bool | None:
    """Whether an owner still runs, according to `queue` (from `squeue_states`), or to its process if it is not a job;
    None if this cannot be determined from here. A pending job does not run."""
    if not owner:
        return False
    if not owner["job"]:
        return is_alive(owner)
    if queue is None:
        return None
    if owner["job"] in queue:
        return queue[owner["job"]] != "PENDING"
    cluster = os.environ.get("SLURM_CLUSTER_NAME", owner["cluster"])
    is_shown = (cluster, os.getuid()) == (owner["cluster"], owner["uid"])  # squeue may hide the jobs of others
    return False if is_shown else None


def show_job(job: str, patience: float) -> dict[str, str]:
    """Slurm's record of a job (JobState, PreemptTime, ...); empty if it does not answer for `patience` seconds."""
    deadline = time.monotonic() + patience
    while not (record := ask("scontrol", "--oneliner", "show", "job", job) or "") and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return dict(field.split("=", 1) for field in record.split() if "=" in field)


def list_hosts(nodes: str) -> frozenset[str]:
    """The names in a list of nodes such as n[1-4]."""
    return frozenset((ask("scontrol", "show", "hostnames", nodes) or "").split()) if nodes else frozenset()
