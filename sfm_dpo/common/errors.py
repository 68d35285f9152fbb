"""How a run ends other than by a crash (1): one exception for each end, with its exit code and state in status.json.

Further exit codes: 5, not pushed (hub/publish.py); 69, the node check failed (health/node_check.py); 130, interrupted
(common/cli.py).
"""

from typing import Any, ClassVar


class RunEnd(Exception):
    """An end that is reported in one line, without a traceback.

    Args:
        message: for an error: names the field, the value and the remedy.
        status: further fields for status.json.
    """

    exit_code: ClassVar[int]
    state: ClassVar[str]  # in status.json

    def __init__(self, message: str, **status: Any):
        super().__init__(" ".join(str(message).split()))
        self.status = status


class UserError(RunEnd):
    """Wrong configuration or data."""

    exit_code, state = 2, "failed"


class DiskFull(UserError):
    """A disk is full or has become read-only; perhaps for one rank alone."""

    exit_code = 1


class OutOfMemory(UserError):
    """A micro-batch does not fit; perhaps on one rank alone."""


class Hung(RunEnd):
    """No rank moved for `hang_timeout` (train/watchdog.py, which leaves without raising it)."""

    exit_code, state = 70, "hung"


class PreflightRefused(UserError):
    exit_code, state = 3, "refused"


class GuardStopped(UserError):
    exit_code, state = 4, "collapsed"


class StopRequested(RunEnd):
    """Stopped by the stop file; the same command goes on."""

    exit_code, state = 75, "stopped"


class PreflightDone(StopRequested):
    """Nothing but the preflight was asked for."""

    exit_code = 0
