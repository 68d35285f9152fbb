"""What Slurm says about jobs."""

import os
import subprocess
from typing import Any

from sfm_dpo.common.process import is_alive


def squeue_states() -> dict[str, str] | None:
    """Slurm's state of each job in the queue; None without Slurm, or if it does not answer."""
    command = ["squeue", "--noheader", "--format=%A %T"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(line.split() for line in result.stdout.splitlines())


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
