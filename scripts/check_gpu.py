#!/usr/bin/env python
"""Checks that training is correct and fast on this machine, for scripts/check_gpu.sh (docs/quickstart.md).

    python scripts/check_gpu.py [--processes 4] [--config recipes/think.yaml ...]

Writes outputs/check-gpu. Exit codes: 0 nothing failed, 1 a check failed, 2 an error.
"""

import sys

import _setup  # noqa: F401  (first: finds the package, reads .env)
import prefetch
import torch

from sfm_dpo.cluster.gpu_check import GpuCheck
from sfm_dpo.common.cli import Arguments, command, number
from sfm_dpo.common.distributed import is_cpu_only
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT


@command
def main(argv: list[str]) -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("--processes", type=number(int, 1))
    options, recipe = parser.parse_known_args(argv)
    on_cpu = is_cpu_only()
    if not on_cpu and not torch.cuda.is_available():
        raise UserError("no GPU is visible; for a dry run: LAUNCH=cpu sbatch --gpus-per-node=0 scripts/check_gpu.sh")
    recipe = recipe or ["--config", "recipes/demo.yaml" if on_cpu else "recipes/think.yaml"]
    if code := prefetch.main(["--download_only", *recipe]):  # downloads do not count to the time of a check
        return code
    processes = options.processes or (2 if on_cpu else torch.cuda.device_count())
    rows = GpuCheck(PROJECT / "outputs/check-gpu", recipe, processes, not on_cpu).run()
    return int(any(row["result"] == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
