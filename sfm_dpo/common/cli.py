"""Command lines and the log. Imports nothing slow, so that --help prints at once."""

import argparse
import functools
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.errors import DISK_REMEDIES, RunEnd, UserError, user_input
from sfm_dpo.common.secrets import mask

log = logging.getLogger(__name__)
# By logger of a library: warnings that tell a user of these commands nothing
NOISE = {
    "DeepSpeed": "Setting accelerator to CPU",
    "accelerate.accelerator": "Gradient accumulation steps mismatch",  # the Trainer counts them here
    "huggingface_hub.utils._http": "Retrying in|thrown while requesting",  # what fails in the end says so
    "transformers.training_args": "The speedups for torchdynamo",
}


class LineHandler(logging.Handler):
    """Prints rank 0's lines with the time on stdout, and its warnings and any rank's errors on stderr, with secrets
    masked. sfm_dpo.setup() installs it."""

    def emit(self, record: logging.LogRecord) -> None:
        message = mask(record.getMessage())
        if not is_main_process() and record.levelno < logging.ERROR:
            return
        if record.levelno >= logging.WARNING:
            print(f"{record.levelname.lower()}: {message}", file=sys.stderr, flush=True)
        else:
            print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def install_log() -> None:
    log = logging.getLogger("sfm_dpo")
    log.handlers = [LineHandler()]
    log.propagate = False
    log.setLevel(logging.INFO)
    for name in NOISE:
        logging.getLogger(name).addFilter(lambda record: not re.search(NOISE[record.name], record.getMessage()))


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """Decorates a script's `main(argv)`: a RunEnd becomes one line on stderr and its exit code."""

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        try:
            return main(argv) or 0
        except RunEnd as end:
            log.error("%s", end)
            return end.exit_code
        except OSError as error:
            if error.errno not in DISK_REMEDIES:
                raise
            remedy = "ask its owner" if isinstance(error, PermissionError) else DISK_REMEDIES[error.errno]
            log.error(f"{error.filename}: {error.strerror}; {remedy}")
            return UserError.exit_code

    return run


def reads_runs(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], int | None]:
    """Decorates the `main` of a command that reads runs, whose files may be damaged: any exception is a UserError."""

    @functools.wraps(main)
    def run(argv: list[str]) -> int | None:
        with user_input(" ".join(argv) or "outputs", "check the options, and whether a file of the run is damaged"):
            return main(argv)

    return run


class Arguments(argparse.ArgumentParser):
    """An ArgumentParser that accepts no abbreviations and keeps the line breaks of its description."""

    def __init__(self, **kwargs: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Prints one line, without argparse's usage text."""
        self.exit(2, f"error: {message} (see --help)\n")


def number(kind: type, lowest: float, highest: float = math.inf) -> Callable[[str], Any]:
    """For `type=`: an int or float between `lowest` and `highest`, both included."""

    def read(text: str) -> Any:
        value = kind(text)
        if not lowest <= value <= highest:
            most = f" and at most {highest:g}" if highest < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r}: must be at least {lowest:g}{most}")
        return value

    read.__name__ = kind.__name__  # argparse: "invalid float value"
    return read


def new_file(text: str) -> Path:
    """For `type=`: the path of a file that can be written, checked before the work starts."""
    path = Path(text)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; name a file in a folder that exists")
    return path
