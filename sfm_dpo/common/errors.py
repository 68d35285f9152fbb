"""Exit codes, and the ways a run ends other than by a crash (code 1): an exception each, with its state."""

import difflib
import errno
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

# Exit codes without an exception
NOT_PUSHED = 5  # but trained and saved
NODE_CHECK_FAILED = 69  # EX_UNAVAILABLE
HUNG = 70

# What to do about a failed read or write
DISK_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give yourself read and write permission"),
    errno.EFBIG: "raise `ulimit -f`",
    errno.EROFS: "use another node, or have it mounted read-write",
    errno.EIO: "check its disk or file server",
    errno.ESTALE: "check its file server",
}
# Errors of the machine, whatever the user has given
_OF_MACHINE = DISK_REMEDIES.keys() - {errno.EACCES, errno.EPERM}


class RunEnd(Exception):
    """An end that is reported without a traceback: in one line, or in one for each item of a list. `status` holds
    further fields for status.json."""

    exit_code: ClassVar[int]
    state: ClassVar[str]  # run.folder.State, in status.json

    def __init__(self, message: str, **status: Any):
        super().__init__("\n- ".join(" ".join(item.split()) for item in str(message).split("\n- ")))
        self.status = status


class UserError(RunEnd):  # wrong configuration or data
    exit_code = 2
    state = "failed"


class DiskFull(RunEnd):  # or read-only; possibly on one rank only
    exit_code = 1
    state = "failed"


class PeerLost(RunEnd):  # the consequence of another rank's end
    exit_code = 1
    state = "failed"


class OutOfMemory(UserError):
    """A micro-batch does not fit; possibly on one rank only."""


class PreflightRefused(RunEnd):
    exit_code = 3
    state = "refused"


class GuardStopped(RunEnd):
    """`checkpoint`: from which a new run could start, or None."""

    exit_code = 4
    state = "collapsed"

    def __init__(self, what: str, remedy: str, *, step: int, checkpoint: str | None):
        start = f" from {checkpoint} (--resume_from_checkpoint {shlex.quote(checkpoint)})" if checkpoint else ""
        message = f"{what}; start a new run{start} in another output_dir, and {remedy}"
        super().__init__(message, step=step, checkpoint=checkpoint)


class StopRequested(RunEnd):  # by the stop file; the same command resumes
    exit_code = 75
    state = "stopped"


class Interrupted(StopRequested):  # by Ctrl-C, or by SIGTERM without a launcher
    exit_code = 130


class PreflightDone(StopRequested):  # only the preflight was requested
    exit_code = 0


@contextmanager
def user_input(what: str, remedy: str = "") -> Iterator[None]:
    """For calls into libraries with a user's input: any exception becomes a UserError in one line, made of `what` was
    read, the first paragraph of the library's message, and the `remedy`. Each library raises other classes. An I/O
    error, such as a full disk, stays what it is."""
    try:
        yield
    except RunEnd:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_MACHINE:
            raise
        reason = " ".join(str(error).split("\n\n")[0].split())
        if "couldn't connect" in reason:
            reason = f"{reason.rstrip('.')} (or run scripts/prefetch.py on a machine with network access)"
        reason = f"{type(error).__name__}: {reason[:400]}".rstrip(": .")
        raise UserError("; ".join(filter(None, [f"{what}: {reason}", remedy]))) from error


@contextmanager
def collect_errors(problems: list[str]) -> Iterator[None]:
    """Adds the message of a UserError to `problems`, so that a start reports all of them."""
    try:
        yield
    except UserError as error:
        problems.append(str(error))


def explain_path(name: str) -> str:
    """The remedy for a name that is neither a folder nor on the Hub, if it looks like a path: its parent exists."""
    parent = Path(name).parent
    return f"check the path: {parent} has no {Path(name).name}" if parent.parts and parent.is_dir() else ""


def nearest(name: Any, known: Iterable[str], prefix: str = "") -> str:
    """The end of an error message: the known name most similar to `name`, if there is one."""
    match = difflib.get_close_matches(str(name), known, n=1, cutoff=0.7)
    return f"; did you mean {prefix}{match[0]}?" if match else ""
