#!/usr/bin/env python
"""Is everything right and fast on this machine? Called by scripts/check_gpu.sh; docs/gpu.md explains the table.

    python scripts/check_gpu.py [--processes 4] [--config recipes/think.yaml ...]

Writes outputs/check-gpu: report.html, checks.json, calibration.json (which plan.py reads) and a log of each check.
Exit codes: 0 nothing failed, 1 a check failed, 2 an error.
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, number


@command
def main(argv: list[str]) -> int:
    if argv[:1] == ["train"]:  # a run of a check
        import train_dpo
        from sfm_dpo.jobs.gpu_check import record_dtypes

        record_dtypes(train_dpo.SFMDPOTrainer)
        return train_dpo.main(argv[1:])
    from sfm_dpo.jobs.gpu_check import format_checks, make_place, measure_attention, run_checks

    if argv[:1] == ["attention"]:
        measure_attention(Path(argv[1]))
        return 0
    own = Arguments(description=__doc__)
    own.add_argument("--processes", type=number(int, 1))
    ours, recipe = own.parse_known_args(argv)
    place = make_place(recipe, ours.processes)
    rows = run_checks(place)
    print(f"\n{format_checks(rows)}\n\nwritten: {place.folder}/report.html")
    return int(any(row["result"] == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
