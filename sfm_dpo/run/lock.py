"""Lock files on a shared file system, also NFS: one owner at a time, taken over when the owner is gone.

The owner is a Slurm job, or without Slurm a process on a host.
"""

import json
import os
import platform
import secrets
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from sfm_dpo.common.files import now


def take_lock(path: Path) -> dict[str, Any] | None:
    """Takes the lock and returns None; or returns the owner that keeps it from us, with `running` as in is_running.

    A lock of this job counts as taken. Of several who try at once, one wins: link(2) creates a file with its content
    or fails. Who finds a stale lock competes in the same way for a file named after it, and replaces it with that.

    Raises:
        OSError: the folder cannot be written.
    """
    owner = _this_owner()
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
            if holder and _is_ours(holder, owner):
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
    if _is_process(read_owner(path), os.getpid()):
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
    return _is_process(owner, owner["pid"]) if owner["host"] == platform.node() else None


def squeue_states() -> dict[str, str] | None:
    """Slurm's state of each job in the queue; None where there is no Slurm, or it does not answer."""
    if shutil.which("squeue") is None:
        return None
    try:
        command = ["squeue", "--noheader", "--format=%A %T"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return dict(line.split() for line in result.stdout.splitlines()) if result.returncode == 0 else None


def _this_owner() -> dict[str, Any]:
    return {
        "job": os.environ.get("SLURM_JOB_ID"),
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "host": platform.node(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "uid": os.getuid(),
        "time": now(),
        "id": secrets.token_hex(8),
    }


def _is_ours(other: dict[str, Any], owner: dict[str, Any]) -> bool:
    """Whether a lock is this process's; or this job's, from an earlier start or from the batch script."""
    if other["job"] is not None and other["job"] == owner["job"] and not _is_process(other, other["pid"]):
        return True
    return _is_process(other, owner["pid"])


def _is_process(owner: dict[str, Any], pid: int) -> bool:
    """Whether process `pid` of this host lives and is the owner, and not another one of that number."""
    if not owner or (owner["host"], owner["pid"]) != (platform.node(), pid):
        return False
    try:
        return abs(_start_time(pid) - owner["started"]) < 1
    except psutil.NoSuchProcess:
        return False


def _start_time(pid: int) -> float:
    """Seconds from boot to the start of the process, which stay the same when the clock is set."""
    return psutil.Process(pid).create_time() - psutil.boot_time()
