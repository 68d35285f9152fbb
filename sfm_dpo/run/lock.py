"""Lock files on a shared file system, also NFS: one owner at a time, taken over when the owner is gone.

The owner is a Slurm job, or without Slurm a process on a host.
"""

import contextlib
import json
import os
import platform
import secrets
import subprocess
import time
from pathlib import Path
from typing import Any

from sfm_dpo.common.files import now
from sfm_dpo.common.leases import is_alive, this_process


def take_lock(path: Path) -> dict[str, Any] | None:
    """Takes the lock and returns None; or returns the owner that keeps it from us, with `running` as in is_running.

    The lock of an earlier start of this job, or of its batch script, counts as ours. Of several who try at once, one
    wins: link(2) creates a file with its content or fails. Who finds a stale lock competes in the same way for a file
    named after it, which then takes its place.
    """
    owner = this_process() | {"cluster": os.environ.get("SLURM_CLUSTER_NAME"), "uid": os.getuid()}
    owner |= {"time": now(), "id": secrets.token_hex(8)}
    mine = path.with_name(f"{path.name}-{owner['id']}")
    created = [mine]
    try:
        mine.write_text(json.dumps(owner))
        while True:
            holder: dict[str, Any] = {}
            chain = [path]
            while there := read_owner(chain[-1]):
                holder = there
                chain.append(path.with_name(f"{path.name}-after-{holder['id']}"))
            if holder == owner:
                mine.replace(path)
                created += chain[1:]
                return None
            same = "pid" if holder and is_alive(holder) else "job"
            if holder.get(same) and holder[same] == owner[same]:
                return None
            if holder and (running := is_running(holder, squeue_states())) is not False:
                return holder | {"running": running}
            try:
                os.link(mine, chain[-1])
                created += chain[-1:] if holder else []
            except FileExistsError:
                time.sleep(0.05)  # NFS may show it a little later
    finally:
        for file in created:
            file.unlink(missing_ok=True)


def release_lock(path: Path) -> None:
    """Gives up the lock if this process took it."""
    owner = read_owner(path)
    if owner.get("pid") == os.getpid() and is_alive(owner):
        with contextlib.suppress(OSError):  # read-only meanwhile; it is stale once this process is gone
            path.unlink(missing_ok=True)


def read_owner(path: Path) -> dict[str, Any]:
    """The owner of a lock; empty where there is none. Raises ValueError where the file is damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def is_running(owner: dict[str, Any], queue: dict[str, str] | None) -> bool | None:
    """Whether the owner of a lock still runs; None where that cannot be known from here.

    Args:
        queue: Slurm's state of each job (squeue_states). A job that waits in it is not running.
    """
    if not owner:
        return False
    if job := owner["job"]:
        if queue is not None and job in queue:
            return queue[job] != "PENDING"
        here = os.environ.get("SLURM_CLUSTER_NAME", owner["cluster"]), os.getuid()  # whose jobs squeue shows for sure
        return None if queue is None or here != (owner["cluster"], owner["uid"]) else False
    return is_alive(owner) if owner["host"] == platform.node() else None


def squeue_states() -> dict[str, str] | None:
    """Slurm's state of each job in the queue; None where there is no Slurm, or it does not answer."""
    try:
        command = ["squeue", "--noheader", "--format=%A %T"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return dict(line.split() for line in result.stdout.splitlines()) if result.returncode == 0 else None
