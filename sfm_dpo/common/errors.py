"""How a run ends other than by a crash (1): one exception for each end, with its exit code and state in status.json.

Further exit codes: 5, not pushed (hub/publish.py); 69, the node check failed (health/node_check.py); 70, hung
(train/watchdog.py); 130 from a script (common/cli.py).
"""

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar


class RunEnd(Exception):
    """An end that is reported in one line, without a traceback; `status` is further fields for status.json."""

    exit_code: ClassVar[int]
    state: ClassVar[str]  # in status.json

    def __init__(self, message: str, **status: Any):
        super().__init__(" ".join(str(message).split()))
        self.status = status


class UserError(RunEnd):  # wrong configuration or data
    exit_code = 2
    state = "failed"


class DiskFull(UserError):  # or read-only; perhaps for one rank alone
    exit_code = 1


class OutOfMemory(UserError):
    """A micro-batch does not fit; perhaps on one rank alone."""


class ResumeRefused(UserError):
    """A checkpoint is of another run, or of other processes."""


class PreflightRefused(UserError):
    exit_code = 3
    state = "refused"


class GuardStopped(UserError):
    exit_code = 4
    state = "collapsed"


class StopRequested(RunEnd):  # by the stop file; the same command resumes
    exit_code = 75
    state = "stopped"


class Interrupted(StopRequested):  # by Ctrl-C, or by SIGTERM where there is no launcher
    exit_code = 130


class PreflightDone(StopRequested):  # only the preflight was requested
    exit_code = 0


def nearest(name: Any, known: Iterable[str], prefix: str = "") -> str:
    """The end of an error message: the known name that resembles `name`, if one does."""
    match = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{match[0]}?" if match else ""
