"""accelerate's launcher, returning the exit code (1 for a signal) and the last line of the rank that failed first.

    python -m sfm_dpo.cluster.launch outputs/dpo --config_file accelerate_config.yaml train_dpo.py --config R

The first argument is the run's folder; the others go to `accelerate launch`, which turns every exit code into 1.
"""

import logging
import os
import platform
import sys
from pathlib import Path

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import sfm_dpo
from sfm_dpo.run.folder import COLLECTIVES, State, read_status, write_status

log = logging.getLogger("sfm_dpo.cluster.launch")  # __name__ is __main__


def main(argv: list[str]) -> int:
    sfm_dpo.setup()
    run = Path(argv[0])
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # the last 2,000 collectives, torch's default
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{run.absolute()}/stacks/{COLLECTIVES}")
    before = read_status(run)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").disabled = True  # "Sending process ... SIGTERM"
    try:
        launch_command(launch_command_parser().parse_args(argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()  # the launcher ended the others itself
        status = read_status(run)
        if failure.exitcode < 0:
            message = f"rank {rank} on {platform.node()} was killed by {failure.signal_name()}"
            is_untold = status == before or State.of(status) in (State.RUNNING, State.FAILED)  # how the run ended
            if is_untold and not State.of(status).has_model:
                write_status(run, State.FAILED, 1, message, any_rank=True, step=status.get("step"))
            log.error(message)
        elif failure.exitcode == 1 and status != before and status.get("message"):
            log.error(status["message"])  # otherwise the rank's own line comes last
        return max(1, failure.exitcode)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
