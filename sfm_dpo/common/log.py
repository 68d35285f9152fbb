"""The log of a command: rank 0's lines on stdout, errors of any rank on stderr, secrets masked.

Modules write with `log = logging.getLogger(__name__)`; sfm_dpo.setup() installs the handler.
"""

import logging
import sys

from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.secrets import mask

_PREFIX = {logging.WARNING: "warning: ", logging.ERROR: "error: "}


class LineHandler(logging.Handler):
    """Writes a record as one line (its level in front, where that is warning or error) and flushes."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR and not is_main_process():
            return
        stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
        print(mask(_PREFIX.get(record.levelno, "") + record.getMessage()), file=stream, flush=True)


def install() -> None:
    log = logging.getLogger("sfm_dpo")
    log.handlers = [LineHandler()]
    log.propagate = False
    log.setLevel(logging.INFO)
