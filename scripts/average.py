#!/usr/bin/env python
"""Averages the weights of runs or checkpoints that started from one base model.

python scripts/average.py outputs/seed0 outputs/seed1 outputs/seed2 --output_dir outputs/mean
python scripts/average.py outputs/dpo/checkpoint-500 outputs/dpo --output_dir outputs/mean
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.jobs.averaging import average_models


@command
def main(argv: list[str]) -> None:
    parser = Arguments(prog="average.py", description=__doc__)
    parser.add_argument("models", metavar="RUN_OR_CHECKPOINT", nargs="+", type=Path)
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args(argv)
    average_models(options.models, options.output_dir)
    print(f"mean of {len(options.models)} models: {options.output_dir}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
