"""Processes: who one is, whether it still runs, and what a command prints."""

import os
import platform
import subprocess
from typing import Any

import psutil

from sfm_dpo.common.files import now


def this_process(pid: int | None = None) -> dict[str, Any]:
    """This process, or `pid`, as the owner of a lease; `started` is there because process ids are reused."""
    pid = pid or os.getpid()
    return {
        "job": os.environ.get("SLURM_JOB_ID"),
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "host": platform.node(),
        "uid": os.getuid(),
        "pid": pid,
        "started": start_time(pid),
        "time": now(),
    }


def start_time(pid: int) -> float:
    """Seconds from boot to the start of the process; unaffected when the clock is set."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


def is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner's process still runs; None if it is on another host."""
    if owner.get("host") != platform.node():
        return None
    try:
        is_same = abs(start_time(owner["pid"]) - owner["started"]) < 5  # the two clocks may differ slightly
        return is_same and psutil.Process(owner["pid"]).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ask(*command: str, stderr: int | None = None, check: bool = True) -> str | None:
    """What a command prints; None if it is not installed, does not answer or, with `check`, fails."""
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=20, check=check)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout
