"""Claims: files by which processes, also on other hosts, share out work, and take it over from those that are gone.

For NFS, too: one of all who try creates a file (O_EXCL), and clocks of hosts are never compared. An owner is gone when
its process is, on this host, or when the time of its file, which it renews, stands still for the lease by the clock of
the one who waits. To take a claim over is to create the next of NAME.claim0, NAME.claim1, ..., in which again one
succeeds. A process that was only stopped is taken for gone: its work is done twice, which must do no other harm.
"""

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

LEASE_SECONDS = 300  # longer than a batch takes, and than an NFS client remembers a file's time (60)


def this_process() -> dict[str, Any]:
    """The owner of a file: Slurm job, host, process, and when that started, for its number may be another's later."""
    pid, job = os.getpid(), os.environ.get("SLURM_JOB_ID")
    return {"job": job, "host": platform.node(), "pid": pid, "started": _start_time(pid)}


def is_alive(owner: dict[str, Any]) -> bool:
    """Whether the process of `this_process` is there, on this host."""
    try:
        same = (
            owner["host"] == platform.node() and abs(_start_time(owner["pid"]) - owner["started"]) < 5
        )  # of the two clocks one may waver
        return same and psutil.Process(owner["pid"]).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _start_time(pid: int) -> float:
    """Seconds from boot to the start of the process, which stay the same when the clock is set."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


class Claims:
    """The claims of this process in a folder; `lease` in seconds."""

    def __init__(self, folder: Path, lease: float = LEASE_SECONDS):
        self.folder, self.lease, self.owner = folder, lease, this_process()
        self._held: list[Path] = []  # and what they took over
        self._seen: dict[Path, tuple[int, float]] = {}  # time of a file, by the server, and when we saw it first

    def take(self, name: str) -> str | None:
        """Claims `name` for this process; returns None, or who has it."""
        series: list[Path] = []
        while True:
            series.append(self.folder / f"{name}.claim{len(series)}")
            try:
                with series[-1].open("x") as file:
                    file.write(json.dumps(self.owner))
                self._held += series
                return None
            except FileExistsError:
                if holder := self._holder(series[-1]):
                    return holder

    def renew(self) -> None:
        """To be called more often than the lease is long."""
        for path in self._held:
            with suppress(OSError):  # taken over, and done; or the file of another user that is gone
                os.utime(path)

    def release_all(self) -> None:
        for path in self._held:
            with suppress(OSError):
                path.unlink()
        self._held.clear()

    def _holder(self, path: Path) -> str | None:
        """Who has a claim; None if its owner is gone."""
        try:
            with path.open() as file:  # opening asks the server, where a look at the path may be answered from memory
                changed, text = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            return "a process that has just released it"
        owner = json.loads(text) if text.endswith("}") else {}  # its owner is writing, or was killed then
        if owner.get("host") == platform.node() and not is_alive(owner):
            return None
        before, since = self._seen.setdefault(path, (changed, time.monotonic()))
        if before != changed:
            self._seen[path] = (changed, time.monotonic())
        elif time.monotonic() - since > self.lease:
            return None
        job = f"job {owner['job']}, " if owner.get("job") else ""
        return f"{job}process {owner.get('pid')} on {owner.get('host')}"
