"""Claims: files by which processes, also on other hosts, share out work, and take it over from those that are gone.

For NFS, too: of all who try, one creates a file (O_EXCL), and no clock of a host is compared with another's. An owner
is gone when its process is, on the same host, or else when the time of its file, which it renews, stands still for as
long as the lease by the clock of the one who waits. A claim is taken over by the creation of the next in the series
NAME.claim0, NAME.claim1, ..., in which again one succeeds; nobody deletes what another may have just made.
"""

import itertools
import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

import psutil

LEASE_SECONDS = 300  # longer than a batch takes, and than an NFS client remembers a file's time (60)


class Claims:
    """The claims of this process in a folder. A mistaken takeover, of a process that was only stopped, costs work that
    is done twice, and must do no other harm.

    Args:
        lease: seconds.
    """

    def __init__(self, folder: Path, lease: float = LEASE_SECONDS):
        self.folder, self.lease = folder, lease
        self._held: dict[str, list[Path]] = {}
        self._seen: dict[Path, tuple[int, float]] = {}  # time of a file, by the server, and when we saw it first
        started = psutil.Process().create_time()
        self.owner = {"host": platform.node(), "pid": os.getpid(), "started": started}
        self.owner["job"] = os.environ.get("SLURM_JOB_ID")

    def take(self, name: str) -> str | None:
        """Claims `name` for this process; returns None, or who has it."""
        series: list[Path] = []
        for number in itertools.count():
            series.append(self.folder / f"{name}.claim{number}")
            try:
                with series[-1].open("x") as file:
                    file.write(json.dumps(self.owner))
            except FileExistsError:
                if holder := self._holder(series[-1]):
                    return holder
            else:
                self._held[name] = series
                return None
        raise AssertionError  # for mypy

    def renew(self) -> None:
        """To be called more often than the lease is long."""
        for series in self._held.values():
            with suppress(FileNotFoundError):  # taken over, and done
                os.utime(series[-1])

    def release(self, name: str) -> None:
        """Gives a claim back, with those that it took over."""
        for path in self._held.pop(name):
            with suppress(OSError):
                path.unlink()

    def _holder(self, path: Path) -> str | None:
        """Who has a claim; None if its owner is gone."""
        try:
            with path.open() as file:  # opening asks the server, where a look at the path may be answered from memory
                changed, text = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            return "a process that has just released it"
        owner = json.loads(text) if text.endswith("}") else {}  # its owner is writing, or was killed then
        if owner.get("host") == platform.node() and not _is_alive(owner):
            return None
        before, since = self._seen.setdefault(path, (changed, time.monotonic()))
        if before != changed:
            self._seen[path] = (changed, time.monotonic())
        elif time.monotonic() - since > self.lease:
            return None
        job = f"job {owner['job']}, " if owner.get("job") else ""
        return f"{job}process {owner.get('pid')} on {owner.get('host')}"


def _is_alive(owner: dict) -> bool:
    try:
        process = psutil.Process(owner["pid"])
        same = abs(process.create_time() - owner["started"]) < 5  # the kernel's time of the start of all wavers
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
