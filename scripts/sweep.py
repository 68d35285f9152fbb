#!/usr/bin/env python
"""Trains a grid of recipe fields as one Slurm array of ordinary runs (docs/evaluation.md).

python scripts/sweep.py grid.yaml --dry_run     prints the commands
python scripts/sweep.py grid.yaml               submits the runs that may be started, also again
python scripts/sweep.py grid.yaml --table       ranks the runs that are done
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_atomically, write_json
from sfm_dpo.jobs.sweep import GRID, MEMBERS, format_sweep, plan_sweep, read_grid
from sfm_dpo.run.files import read_file
from sfm_dpo.run.reader import SUBMITTED


@command
def main(argv: list[str]) -> int:
    parser = Arguments(prog="sweep.py", description=__doc__)
    parser.add_argument("grid", metavar="GRID.yaml", type=Path)
    parser.add_argument("--dry_run", action="store_true", help="print the commands")
    parser.add_argument("--table", action="store_true", help="rank the runs that are done")
    options = parser.parse_args(argv)
    grid = read_grid(options.grid)
    if options.table:
        print(format_sweep(grid))
        return 0
    lines, numbers = plan_sweep(grid)
    if len(numbers) < len(lines):
        print(f"# {len(numbers)} of the {len(lines)} runs are to be submitted; the states of all: --table")
    if not numbers:
        return 0
    members = Path(grid.output_dir) / MEMBERS
    script = [*shlex.split(grid.sbatch), "scripts/dpo_train.sh", "--members", str(members)]
    sbatch = ["sbatch", "--parsable", "--output=logs/%x-%A_%a.out"]
    # Preflight and reference pass once, before the array
    first = [*sbatch, f"--array={numbers[0]}", *script, "--preflight_only", "true"]
    tasks = ",".join(map(str, numbers)) + (f"%{grid.at_once}" if grid.at_once else "")
    array = [*sbatch, "--kill-on-invalid-dep=yes", "--dependency=afterok:JOB", f"--array={tasks}", *script]
    if options.dry_run:
        print(shlex.join(first), shlex.join(array), sep="\n")
        print(*(f"# {number}: {line}" for number, line in enumerate(lines)), sep="\n")
        return 0
    if not shutil.which("sbatch"):
        raise UserError("sbatch: not found; submit on a machine with Slurm, or run the commands that --dry_run prints")
    members.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(members, "".join(f"{line}\n" for line in lines))
    write_atomically(members.with_name(GRID), options.grid.read_text())
    job = submit(first)
    job = submit([word.replace(":JOB", f":{job}") for word in array])
    print(f"Submitted batch job {job}")
    names = [shlex.split(line)[-1] for line in lines]
    tasks_of_runs = {Path(names[number]).name: f"{job}_{number}" for number in numbers}
    submitted = members.with_name(SUBMITTED)
    write_json(submitted, read_file(submitted) | tasks_of_runs)
    return 0


def submit(command: list[str]) -> str:
    """The id of the submitted job. Ends the script if sbatch, which has printed why, refuses it."""
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout.split(";")[0].strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
