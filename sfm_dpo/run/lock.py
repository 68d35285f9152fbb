"""Who has a run's folder: rank 0 of train_dpo.py holds a lease of it while it lives (common/leases.py).

Nobody waits for this lease to expire: a start that finds it held ends at once, unless its owner is gone, by its
process on this host or by Slurm's queue. A run whose lease another process has taken after all ends.
"""

import logging
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from filelock import LeaseCompromise

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.leases import SETTLE_SECONDS, Lease, describe_owner, is_alive, read_owner

log = logging.getLogger(__name__)

LOCK = ".lock"
ATTEMPTS = 5  # to replace the file of an owner that is gone; others may try at the same time


def take_folder(run: Path) -> Lease:
    """Takes the lease of a run's folder. Raises UserError if another run has it."""
    lease = Lease(run / LOCK, on_loss=_end_superseded_run)
    for _ in range(ATTEMPTS):
        if lease.take():
            return lease
        check_owner(run)
        if lease.take_over():
            return lease
    raise UserError(f"output_dir {run}: {LOCK} cannot be replaced; remove it if nothing trains there")


def check_owner(run: Path) -> None:
    """Raises UserError if another process or job has the folder. An earlier start of this job is none."""
    path = run / LOCK
    if path.exists() and not read_owner(path):
        time.sleep(SETTLE_SECONDS)  # its owner may be writing it
    owner = read_owner(path)
    if not owner:
        if path.exists():
            raise UserError(f"output_dir {run}: {LOCK} is damaged; remove it if nothing trains there")
        return
    if owner["job"] and owner["job"] == os.environ.get("SLURM_JOB_ID") and not is_alive(owner):
        return
    if is_running(owner, squeue_states()) is not False:
        raise UserError(
            f"output_dir {run}: {describe_owner(owner)} has it since {owner['time']}; wait, end it, or choose another "
            f"output_dir (if it has ended all the same: remove {path})"
        )


def _end_superseded_run(loss: LeaseCompromise) -> None:
    """Ends this process, from the thread of the heartbeat, if the folder is another's; status.json is, too."""
    path = Path(loss.lock_file)
    owner = read_owner(path)
    if owner and (owner["host"], owner["pid"]) != (platform.node(), os.getpid()):
        log.error(f"output_dir {path.parent}: {describe_owner(owner)} has taken it from this run, which ends here")
        os._exit(UserError.exit_code)
    log.warning(f"{path} was removed or cannot be renewed: nothing keeps another run out of the folder any more")


def is_running(owner: dict[str, Any], queue: dict[str, str] | None) -> bool | None:
    """Whether the owner of a folder still runs; None where that cannot be known from here.

    Args:
        owner: of `read_owner`.
        queue: Slurm's state of each job (squeue_states). A job that waits in it is not running.
    """
    if not owner:
        return False
    job = owner["job"]
    if not job:
        return is_alive(owner) if owner["host"] == platform.node() else None
    if queue is not None and job in queue:
        return queue[job] != "PENDING"
    here = (os.environ.get("SLURM_CLUSTER_NAME", owner["cluster"]), os.getuid())  # whose jobs squeue shows for sure
    return None if queue is None or here != (owner["cluster"], owner["uid"]) else False


def squeue_states() -> dict[str, str] | None:
    """Slurm's state of each job in the queue; None where there is no Slurm, or it does not answer."""
    try:
        command = ["squeue", "--noheader", "--format=%A %T"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return dict(line.split() for line in result.stdout.splitlines()) if result.returncode == 0 else None
