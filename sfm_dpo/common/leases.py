"""Leases: files by which processes, also on other hosts, share out work and take over what a dead process held.

A lease is a `SoftFileLease` of filelock 4.2: of all who try, one creates the file; a thread of its owner touches it; a
contender takes it over when the owner's process is dead on this host, or when the file has not changed for
LEASE_SECONDS by the contender's own clock. An owner that was stopped for so long learns it from `on_loss`.

filelock replaces a stale file by renameat2(RENAME_EXCHANGE), which NFS, Lustre and CephFS refuse: there it would wait
for a dead owner forever. `take_over` removes the file instead, and looks again after a moment, because another
contender may have removed the new file in place of the stale one.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import SoftFileLease, Timeout

from sfm_dpo.common.files import now

LEASE_SECONDS = 300.0  # longer than a batch, and than an NFS client remembers a file's time (60 s)
SETTLE_SECONDS = 1.0


class Lease:
    """A lease, held by this process after `take` until `release`. The thread that renews it calls `on_loss`."""

    def __init__(self, path: Path, on_loss: Callable[[Any], None] | None = None):
        self.path = path
        self._lock = SoftFileLease(
            path,
            lease_duration=LEASE_SECONDS,
            heartbeat_interval=LEASE_SECONDS / 15,
            on_compromise=on_loss,
            thread_local=False,
        )
        self._changed = 0  # time of the file by the server's clock
        self._seen = 0.0  # when it was first seen, by ours

    def take(self) -> bool:
        """Tries once; to wait for an owner on another host, call it again and again."""
        if self._acquire():
            return True
        owner = read_owner(self.path)
        is_dead = owner.get("host") == platform.node() and not is_alive(owner)
        return (is_dead or self._is_expired()) and self.take_over()

    def take_over(self) -> bool:
        """Takes the lease of an owner that is known to be gone. False where another contender was faster."""
        self._lock.force_break()
        if not self._acquire():
            return False
        time.sleep(SETTLE_SECONDS)
        if not self._lock.is_lock_held_by_us:
            self.release()
        return self._lock.is_locked

    def release(self) -> None:
        """Gives the lease up, if this process holds it."""
        with suppress(OSError):  # the disk is read-only by now; the lease is stale once this process is gone
            self._lock.release()

    def _acquire(self) -> bool:
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return False
        with self.path.open("a") as file:  # filelock ignores a line that it does not know
            file.write(f"owner={json.dumps(this_process())}\n")
        return True

    def _is_expired(self) -> bool:
        try:
            changed = self.path.stat().st_mtime_ns  # as new as the server's, because filelock has just opened the file
        except FileNotFoundError:
            return False
        if changed != self._changed:
            self._changed = changed
            self._seen = time.monotonic()
        return time.monotonic() - self._seen > LEASE_SECONDS


def this_process() -> dict[str, Any]:
    """The owner of a lease; `started`, because the number of a process may be reused."""
    return {
        "job": os.environ.get("SLURM_JOB_ID"),
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "host": platform.node(),
        "uid": os.getuid(),
        "pid": os.getpid(),
        "started": start_time(os.getpid()),
        "time": now(),
    }


def is_alive(owner: dict[str, Any]) -> bool:
    """Whether the process of `this_process` runs on this host."""
    try:
        # Within 5 s, because one of the two clocks may waver
        is_same = owner["host"] == platform.node() and abs(start_time(owner["pid"]) - owner["started"]) < 5
        return is_same and psutil.Process(owner["pid"]).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_time(pid: int) -> float:
    """Seconds from boot to the start of the process, which stay the same when the clock is set."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


def read_owner(path: Path) -> dict[str, Any]:
    """Who holds a lease, as `this_process` says it; empty where that cannot be read."""
    try:
        head, *lines = path.read_text().split("owner=")
        owners = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return {}
    # A contender that was superseded at once may have added its line to its successor's file
    return next((owner for owner in owners if f"pid={owner['pid']}\n" in head), {})


def describe_owner(owner: dict[str, Any]) -> str:
    """Who holds a lease, in words."""
    if not owner:
        return "a process that has just taken or released it"
    job = f"job {owner['job']}, " if owner["job"] else ""
    return f"{job}process {owner['pid']} on {owner['host']}"
