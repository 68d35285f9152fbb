#!/usr/bin/env python
"""Checks a configuration as train_dpo.py will. The batch scripts run this first and read what it prints.

    python scripts/check_config.py --config recipes/think.yaml --learning_rate 5e-7
    LAUNCH=zero3 python scripts/check_config.py 16 --config recipes/think.yaml
    python scripts/check_config.py configs/accelerate/zero3.yaml 16 --config recipes/think.yaml

The first arguments are the launch configuration, by default that of LAUNCH (scripts/common.sh), and the number of
processes over all nodes, by default that of the launch configuration. If there is something to train, it prints
config_file, the launch configuration, and output_dir. If only steps of the end of a trained run are open, such as its
push, it does them here, so that no node has to start.
"""

import contextlib
import os
import sys
from itertools import dropwhile
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from sfm_dpo.common.cli import Arguments, command, reads_runs
from sfm_dpo.common.distributed import launch_file
from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.config.checks import BROUGHT
from sfm_dpo.config.fields import parse_config
from sfm_dpo.run.folder import make_folder
from sfm_dpo.run.lock import check_owner
from sfm_dpo.run.start import read_start


@command
@reads_runs
def main(argv: list[str]) -> int:
    Arguments(description=__doc__).parse_known_args(argv[:1])  # behind a recipe --help is train_dpo.py's
    options = list(dropwhile(lambda word: not word.startswith("--"), argv))
    words = argv[: len(argv) - len(options)]
    file = launch_file(os.environ.get("LAUNCH") or "zero2")
    if words and not words[0].isdecimal():
        file = words.pop(0)
    with user_input(f"cannot read {file}", "set LAUNCH to zero2 or the name of a file in configs/accelerate"):
        launch = yaml.safe_load(Path(file).read_text())
        launcher = launch["distributed_type"]
        arguments = launch_command_parser().parse_args(["--config_file", file, "train_dpo.py"])
        brought = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
        processes = " ".join(words) or str(launch["num_processes"])
    if not processes.isdecimal() or int(processes) < 1:
        raise UserError(f"{processes}: give a launch file, the number of processes, then train_dpo.py's options")
    os.environ |= {name: brought[name] for name in BROUGHT.keys() & brought.keys()}  # as the launcher does
    os.environ[f"ACCELERATE_USE_{launcher}"] = "true"  # dtype depends on it
    if deepspeed := launch.get("deepspeed_config"):
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = deepspeed["deepspeed_config_file"]
    config = parse_config(options, world_size=int(processes))
    run = Path(config.train.output_dir)
    check_owner(make_folder(run))
    if read_start(config, int(processes), {}).trains:
        print(f"config_file: {file}")
        print(f"output_dir: {run}")
        return 0
    from sfm_dpo.evaluation.eval_command import EvalCommand  # these take seconds
    from sfm_dpo.training_run import TrainingRun

    with contextlib.redirect_stdout(sys.stderr), TrainingRun() as this:  # the batch script reads stdout
        this.close_steps(config, this.begin(config).steps, EvalCommand(config.train))
    return this.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
