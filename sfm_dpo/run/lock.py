"""Leases: files by which one of many processes, on any host, owns a run's folder or a reference cache."""

import json
import logging
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import LeaseCompromise, SoftFileLease, Timeout

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import naming, sync
from sfm_dpo.common.process import is_alive, this_process
from sfm_dpo.common.slurm import is_running, squeue_states

log = logging.getLogger(__name__)

LEASE_SECONDS = 300.0  # longer than a batch, and than an NFS client caches a file's time (60 s)
SETTLE_SECONDS = 1.0
_OWNER = set("job cluster host uid pid started time".split())  # keys of `this_process`
LOCK = ".lock"  # the lease of a run's folder; rank 0 of train_dpo.py holds it while it runs


class Lease:
    """A file that only one contender can create. A thread touches it until `release`, and calls `on_loss` on a loss.

    A contender takes it over when the owner's process on this host has died, or when the file has not changed for
    LEASE_SECONDS by the contender's own clock. filelock 4.2 can do so only by renameat2(RENAME_EXCHANGE), which NFS,
    Lustre and CephFS refuse; hence `take_over`.
    """

    def __init__(self, path: Path, on_loss: Callable[[LeaseCompromise], None] | None = None):
        self.path = path
        beat = LEASE_SECONDS / 15
        self._lock = SoftFileLease(
            path, lease_duration=LEASE_SECONDS, heartbeat_interval=beat, on_compromise=on_loss, thread_local=False
        )
        self._changed = 0  # the file's time by the server's clock
        self._seen = 0.0  # when that time was first seen, by our clock

    def take(self) -> bool:
        """Tries once; call it repeatedly to wait for an owner on another host."""
        if self._acquire():
            return True
        owner = read_owner(self.path)
        return (is_alive(owner) is False or self._is_expired()) and self.take_over(owner)

    def take_over(self, owner: dict[str, Any]) -> bool:
        """Takes the lease of `owner`, which no longer runs. False if another contender was faster."""
        if read_owner(self.path) != owner:
            return False
        aside = self.path.with_name(f"{self.path.name}.{platform.node()}.{os.getpid()}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return False
        is_stale = read_owner(aside) == owner
        if not is_stale:  # it is another contender's new file
            with suppress(OSError):
                os.link(aside, self.path)
        aside.unlink()
        if not is_stale or not self._acquire():
            return False
        time.sleep(SETTLE_SECONDS)  # another contender may have moved this new file, and a third one created its own
        if not self._lock.is_lock_held_by_us:
            self.release()
        return self._lock.is_locked

    def release(self) -> None:
        with suppress(OSError):  # the disk is read-only; the lease becomes stale when this process ends
            self._lock.release()

    def _acquire(self) -> bool:
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return False
        try:
            for _ in range(5):  # contenders exchange files for a moment: the line may go into that of another
                self._name_owner()
                if not self._lock.is_lock_held_by_us or read_owner(self.path).get("pid") == os.getpid():
                    break
        except OSError:
            self.release()
            raise
        if not self._lock.is_lock_held_by_us:
            self.release()
        return self._lock.is_locked

    def _name_owner(self) -> None:
        with suppress(FileNotFoundError), naming(self.path), self.path.open("r+") as file:  # it may have been moved
            file.seek(0, os.SEEK_END)
            file.write(f"owner={json.dumps(this_process())}\n")  # filelock ignores lines it does not know
            sync(file)

    def _is_expired(self) -> bool:
        try:
            changed = self.path.stat().st_mtime_ns  # current, because filelock has just opened the file
        except FileNotFoundError:
            return False
        if changed != self._changed:
            self._changed = changed
            self._seen = time.monotonic()
        return time.monotonic() - self._seen > LEASE_SECONDS


def is_held(path: Path) -> bool:
    """Whether the owner of a lease runs or, if it is on another host, has lately renewed it (by this host's clock)."""
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    is_running = is_alive(read_owner(path))
    return age < LEASE_SECONDS if is_running is None else is_running


def read_owner(path: Path) -> dict[str, Any]:
    """The owner of a lease, in the form of `this_process`; empty if it cannot be read."""
    try:
        head, *lines = path.read_text().split("owner=")
        owners = [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return {}
    good = [owner for owner in owners if isinstance(owner, dict) and owner.keys() >= _OWNER]
    # A contender that lost the lease at once may have added its line to its successor's file
    return next((owner for owner in good if f"pid={owner['pid']}\n" in head), {})


def describe_owner(owner: dict[str, Any]) -> str:
    if not owner:
        return "a process that has just locked or released it"
    job = f"job {owner['job']}, " if owner["job"] else ""
    return f"{job}process {owner['pid']} on {owner['host']}"


def take_folder(run: Path) -> Lease:
    """Takes the lease of a run's folder. Raises UserError at once if another run holds it."""
    lease = Lease(run / LOCK, on_loss=_end_superseded_run)
    for _ in range(5):  # others may be trying at the same time
        if lease.take() or lease.take_over(check_owner(run)):
            return lease
    raise UserError(f"output_dir {run}: its stale {LOCK} cannot be replaced; remove it if no run uses the folder")


def check_owner(run: Path) -> dict[str, Any]:
    """The owner of a run's lock, which has ended or is this job before it was requeued. Raises UserError otherwise."""
    path = run / LOCK
    with suppress(FileNotFoundError, PermissionError), naming(path):
        path.read_bytes()  # a disk's error does not mean that the lock is damaged
    owner = read_owner(path)
    if not owner and path.exists():
        time.sleep(SETTLE_SECONDS)  # its owner may be writing it
        owner = read_owner(path)
        # One that never had an owner is left by a process that could not write more; if it is only slow, it gives way
        with suppress(FileNotFoundError):
            had_owner = not os.access(path, os.R_OK) or b"owner=" in path.read_bytes()
            if not owner and had_owner and time.time() - path.stat().st_mtime < LEASE_SECONDS:  # it may be renewed
                wait = f"wait {LEASE_SECONDS:g} s, or remove it if no run uses the folder"
                raise UserError(f"output_dir {run}: {LOCK} is damaged; {wait}")
    me = this_process()
    is_my_job = me["job"] and owner.get("job") == me["job"]
    was_requeued = is_my_job and owner.get("restart") != me["restart"] and not is_alive(owner)
    if not was_requeued and is_running(owner, squeue_states([owner.get("job")])) is not False:
        raise UserError(
            f"output_dir {run}: locked by {describe_owner(owner)} since {owner['time']}; wait, end that run, or "
            f"choose another output_dir (if it has already ended: remove {path})"
        )
    return owner


def _end_superseded_run(loss: LeaseCompromise) -> None:
    """Ends this process, from the heartbeat's thread, if another run has locked the folder and its status.json."""
    path = Path(loss.lock_file)
    owner = read_owner(path)
    if owner and (owner["host"], owner["pid"]) != (platform.node(), os.getpid()):
        log.error(f"output_dir {path.parent}: now locked by {describe_owner(owner)}; this run ends")
        os._exit(UserError.exit_code)
    log.warning(f"{path} was removed or cannot be renewed; do not start another run here until this one ends")
