"""Processes: who one is, whether it still runs, what it may use of memory, and what a command prints."""

import atexit
import os
import platform
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from sfm_dpo.common.files import now


def this_process() -> dict[str, Any]:
    """This process as the owner of a lease; `started` is there because process ids are reused."""
    return {
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT"),  # of the job
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "host": platform.node(),
        "uid": os.getuid(),
        "pid": os.getpid(),
        "started": start_time(os.getpid()),
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


def ask(*command: str, stderr: int | None = None) -> str | None:
    """What a command prints; None if it is not installed, does not answer or fails."""
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout


def end_process(code: int) -> NoReturn:
    """Ends this process with an exit code, a launcher's rank without the interpreter's own end: then threads of gloo
    that still hold tensors abort one of some thirty ranks, also after torch's destroy_process_group
    (https://github.com/pytorch/pytorch/pull/179291)."""
    if "LOCAL_RANK" in os.environ:
        # As the interpreter does first: waits for threads, and calls what libraries have registered
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def available_memory(root: str = "/") -> int:
    """Bytes of main memory that this process may still take: of the machine's, and of the limits of its cgroup and of
    each cgroup above; Slurm limits the job's. `root`: where the file systems proc and sys are."""
    rooms = [psutil.virtual_memory().available]
    groups = Path(root, "proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = Path(root, "sys/fs/cgroup", controllers)  # version 1 has a tree for each controller
        group = base / path.lstrip("/")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            with suppress(OSError, ValueError):  # no limit: no file, or `max`
                limit, used = (int((folder / name).read_text()) for name in names)
                rooms.append(limit - used + _count_cache(folder))
    return max(0, min(rooms))


def _count_cache(group: Path) -> int:
    """Bytes of files that the kernel keeps in memory for a cgroup, and drops when memory is short."""
    with suppress(OSError):
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(facts.get("inactive_file", 0))
    return 0
