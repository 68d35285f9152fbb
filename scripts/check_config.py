#!/usr/bin/env python
"""Checks a configuration as train_dpo.py will. The batch scripts run this first and read what it prints.

    python scripts/check_config.py --config recipes/think.yaml --learning_rate 5e-7
    LAUNCH=zero3 python scripts/check_config.py 16 --config recipes/think.yaml

The launch configuration is that of LAUNCH (scripts/common.sh). The first argument is the number of processes over all
nodes, by default that of the launch configuration. Unless the run is already done, it prints config_file, the launch
configuration, and output_dir.
"""

import os
import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
import yaml

from sfm_dpo.common.cli import command, reads_runs
from sfm_dpo.common.distributed import launch_file
from sfm_dpo.common.errors import user_input
from sfm_dpo.config import parse_config
from sfm_dpo.run.checkpoint import check_resume, newest_checkpoint, why_incomplete
from sfm_dpo.run.folder import State, check_folder, read_state, read_status


@command
@reads_runs
def main(argv: list[str]) -> None:
    name = os.environ.get("LAUNCH") or "zero2"
    file = launch_file(name)
    is_given = bool(argv) and argv[0].isdecimal()
    with user_input(f"LAUNCH={name}: cannot read {file}", "choose zero2 or the name of a file in configs/accelerate"):
        launch = yaml.safe_load(Path(file).read_text())
        launcher = launch["distributed_type"]
        processes = int(argv[0] if is_given else launch["num_processes"])
    os.environ[f"ACCELERATE_USE_{launcher}"] = "true"  # as the launcher does; dtype depends on it
    if deepspeed := launch.get("deepspeed_config", {}).get("deepspeed_config_file"):
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = deepspeed
    config = parse_config(argv[is_given:], world_size=processes)
    run = config.train.output_dir
    if check_folder(config):
        start = config.train.resume_from_checkpoint or newest_checkpoint(run)
        if start and why_incomplete(Path(start)) is None:
            check_resume(Path(start), {"world_size": processes}, config.train.ignore_resume_mismatch)
        print(f"config_file: {file}")
        print(f"output_dir: {run}")
    elif read_state(run) is State.PUSH_FAILED:
        print(f"{run}: trained, but not pushed: {read_status(run)['message']}", file=sys.stderr)
    else:
        print(f"{run}: already done; choose another output_dir to run again", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
