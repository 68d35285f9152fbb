#!/usr/bin/env python
"""Reads a configuration as train_dpo.py will, and prints its output_dir. The batch scripts' first step.

    python scripts/check_config.py accelerate_config.yaml 4 --config recipes/think.yaml --learning_rate 5e-7

The first two arguments are the launch configuration and the number of processes over all nodes. Loads no model and no
data. A mistake is one line and exit code 2. A run that is already done prints no output_dir.
"""

import os
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sfm_dpo.config import UserError, parse_config
from sfm_dpo.overview import check_not_running
from sfm_dpo.run_dir import claim, read_status


def main(argv: list[str]) -> int:
    if len(argv) < 2 or not argv[1].isdigit() or argv[1] == "0":
        print(__doc__, file=sys.stderr)
        return 2
    launch = yaml.safe_load(Path(argv[0]).read_text())
    os.environ[f"ACCELERATE_USE_{launch['distributed_type']}"] = "true"  # as the launcher does: dtype depends on it
    try:
        config = parse_config(argv[2:], world_size=int(argv[1]))
        if claim(config):
            check_not_running(config.train.output_dir)
            print(config.train.output_dir)
        elif (status := read_status(config.train.output_dir))["state"] == "push_failed":
            print(f"{config.train.output_dir}: trained, but not pushed: {status['message']}", file=sys.stderr)
        else:
            print(f"{config.train.output_dir}: already done; choose another output_dir to run again", file=sys.stderr)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
