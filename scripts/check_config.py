#!/usr/bin/env python
"""Checks a configuration as train_dpo.py will. The batch scripts run this first and read what it prints.

    python scripts/check_config.py --config recipes/think.yaml --learning_rate 5e-7
    LAUNCH=zero3 python scripts/check_config.py 16 --config recipes/think.yaml
    python scripts/check_config.py configs/accelerate/zero3.yaml 16 --config recipes/think.yaml

The first arguments are the launch configuration, by default that of LAUNCH (scripts/common.sh), and the number of
processes over all nodes, by default that of the launch configuration. Unless the run is already done, it prints
config_file, the launch configuration, and output_dir.
"""

import os
import sys
from itertools import takewhile
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
import yaml

from sfm_dpo.common.cli import command, reads_runs
from sfm_dpo.common.distributed import launch_file
from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.config import parse_config
from sfm_dpo.run.checkpoint import check_resume, newest_checkpoint, why_incomplete
from sfm_dpo.run.folder import State, check_folder, read_state, read_status


@command
@reads_runs
def main(argv: list[str]) -> None:
    given = list(takewhile(lambda word: not word.startswith("--"), argv))
    words = list(given)
    if words and not words[0].isdecimal():
        file = words.pop(0)
        source = file
    else:
        name = os.environ.get("LAUNCH") or "zero2"
        file = launch_file(name)
        source = f"LAUNCH={name}"
    remedy = "choose zero2 or the name of a file in configs/accelerate"
    with user_input(f"{source}: cannot read {file}", remedy):
        launch = yaml.safe_load(Path(file).read_text())
        launcher = launch["distributed_type"]
        processes = " ".join(words) or str(launch["num_processes"])
    if not processes.isdecimal() or int(processes) < 1:
        raise UserError(
            f"{processes}: give a launch configuration, the number of processes, then train_dpo.py's options"
        )
    os.environ[f"ACCELERATE_USE_{launcher}"] = "true"  # as the launcher does; dtype depends on it
    if deepspeed := launch.get("deepspeed_config"):
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = deepspeed["deepspeed_config_file"]
    config = parse_config(argv[len(given) :], world_size=int(processes))
    run = config.train.output_dir
    if check_folder(config):
        start = config.train.resume_from_checkpoint or newest_checkpoint(run)
        if start and why_incomplete(Path(start)) is None:
            check_resume(Path(start), {"world_size": int(processes)}, config.train.ignore_resume_mismatch)
        print(f"config_file: {file}")
        print(f"output_dir: {run}")
    elif read_state(run) is State.PUSH_FAILED:
        print(f"{run}: trained, but not pushed: {read_status(run)['message']}", file=sys.stderr)
    else:
        print(f"{run}: already done; choose another output_dir to run again", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
