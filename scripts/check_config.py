#!/usr/bin/env python
"""Checks a configuration as train_dpo.py will, and prints its output_dir. The batch scripts run this first.

    python scripts/check_config.py accelerate_config.yaml 4 --config recipes/think.yaml --learning_rate 5e-7

The first two arguments are the launch configuration and the number of processes over all nodes. If the run is already
done, no output_dir is printed.
"""

import os
import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
import yaml

from sfm_dpo.common.cli import command
from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.config import parse_config
from sfm_dpo.run.checkpoint import check_resume, newest_checkpoint, why_incomplete
from sfm_dpo.run.folder import State, check_folder, read_state, read_status


@command
def main(argv: list[str]) -> None:
    if len(argv) < 2 or not argv[1].isdecimal() or int(argv[1]) < 1:
        words = " ".join(argv[:2]) or "no arguments"
        raise UserError(f"{words}: give a launch configuration, the number of processes, then train_dpo.py's options")
    remedy = "give accelerate_config.yaml or a file of configs/accelerate"
    with user_input(f"{argv[0]}: not a launch configuration of accelerate", remedy):
        launcher = yaml.safe_load(Path(argv[0]).read_text())["distributed_type"]
    os.environ[f"ACCELERATE_USE_{launcher}"] = "true"  # as the launcher does; dtype depends on it
    config = parse_config(argv[2:], world_size=int(argv[1]))
    run = config.train.output_dir
    if check_folder(config):
        start = config.train.resume_from_checkpoint or newest_checkpoint(run)
        if start and why_incomplete(Path(start)) is None:
            check_resume(Path(start), {"world_size": int(argv[1])}, config.train.ignore_resume_mismatch)
        print(run)
    elif read_state(run) is State.PUSH_FAILED:
        print(f"{run}: trained, but not pushed: {read_status(run)['message']}", file=sys.stderr)
    else:
        print(f"{run}: already done; choose another output_dir to run again", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
