"""The scripts' command lines: a decorator that reports how they end, and argparse types that find a mistake early.

Imports nothing slow, so that --help answers at once. (train_dpo.py's fields are config.py's.)
"""

import argparse
import functools
import logging
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from sfm_dpo.common.errors import RunEnd, nearest
from sfm_dpo.common.secrets import mask_traceback

log = logging.getLogger(__name__)


def command(main: Callable[[list[str]], int | None]) -> Callable[[list[str]], int]:
    """Decorates a script's `main(argv)`, so that it returns the exit code of every end but a crash.

    A RunEnd is one line on stderr, Ctrl-C is exit code 130, and the traceback of a crash masks secrets.
    """

    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        sys.excepthook = mask_traceback
        try:
            return main(argv) or 0
        except RunEnd as end:
            log.error("%s", end)
            return end.exit_code
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130

    return run


class Arguments(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviations and keeps the lines of its description."""

    def __init__(self, **kwargs: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """One line, without the usage that argparse would print above it."""
        unknown = re.match(r"unrecognized arguments: (--[^= ]*)", message)
        hint = nearest(unknown[1], self._option_string_actions) if unknown else ""
        self.exit(2, f"error: {message}{hint} (see --help)\n")


def number(kind: type, lowest: float, highest: float = math.inf) -> Callable[[str], Any]:
    """For `type=`: a finite int or float from `lowest` to `highest`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and lowest <= value <= highest):
            limits = f"from {lowest:g} " + (f"to {highest:g}" if highest < math.inf else "on")
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} must be {what} {limits}")
        return value

    return read


def new_file(text: str) -> Path:
    """For `type=`: a file that can be written. Found out before the work whose result it is to hold."""
    path = Path(text)
    folder = path.absolute().parent
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder or a device; name a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: its folder does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; check the permissions, or choose another")
    return path


def new_figure(text: str) -> Path:
    """For `type=`: as new_file, of a kind that matplotlib draws."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r}: the name must end in .png, .svg or .pdf")
    return new_file(text)
