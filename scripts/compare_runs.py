#!/usr/bin/env python
"""Compares two runs: every common metric step by step, and all other differences.

    python scripts/compare_runs.py RUN_A RUN_B [--json FILE]

A run is a folder that train_dpo.py wrote, or the folder or a checkpoint of any HF Trainer.
Exit codes: 0 identical or within noise (docs/verification.md), 1 diverging, 2 an error.
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, new_file, number, reads_runs
from sfm_dpo.common.files import write_json
from sfm_dpo.report.compare import compare_runs, format_comparison, read_log


@command
@reads_runs
def main(argv: list[str]) -> int:
    parser = Arguments(prog="compare_runs.py", description=__doc__)
    parser.add_argument("run_a", type=Path)
    parser.add_argument("run_b", type=Path)
    parser.add_argument("--tolerance", type=number(float, 1e-12), help="relative; default: 0.001, or 0.05 in 16 bit")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the full comparison, with both series")
    options = parser.parse_args(argv)
    result = compare_runs(read_log(options.run_a), read_log(options.run_b), options.tolerance)
    print(format_comparison(result))
    if options.json:
        write_json(options.json, result)
    return int(result["verdict"]["verdict"] == "diverging")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
