"""What does a mistake say? One line, and an exit code. Imported by all, so it imports nothing heavy."""

from typing import Any


class UserError(Exception):
    """A mistake of the user's: reported in one line, without a traceback.

    Args:
        message: names the field, the value and the remedy.
        exit_code: 2 wrong configuration or data (default), 3 preflight refused, 4 the guard stopped the run,
            5 the push failed.
        status: further fields for status.json.
    """

    def __init__(self, message: str, exit_code: int = 2, **status: Any):
        super().__init__(" ".join(str(message).split()))
        self.exit_code, self.status = exit_code, status
