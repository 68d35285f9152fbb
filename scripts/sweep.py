#!/usr/bin/env python
"""Trains a grid of recipe fields as one Slurm array of ordinary runs (docs/evaluation.md).

python scripts/sweep.py grid.yaml --dry_run     prints the commands
python scripts/sweep.py grid.yaml               submits the runs that are not done; without Slurm, trains them here
python scripts/sweep.py grid.yaml --table       the best first
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.files import write_atomically
from sfm_dpo.jobs.sweep import GRID, MEMBERS, format_sweep, plan_sweep, read_grid


@command
def main(argv: list[str]) -> int:
    parser = Arguments(prog="sweep.py", description=__doc__)
    parser.add_argument("grid", metavar="GRID.yaml", type=Path)
    parser.add_argument("--dry_run", action="store_true", help="print the commands")
    parser.add_argument("--table", action="store_true", help="rank the runs that are done")
    parser.add_argument("--local", action="store_true", help="one after the other here, also where Slurm is")
    options = parser.parse_args(argv)
    grid = read_grid(options.grid)
    if options.table:
        print(format_sweep(grid))
        return 0
    lines, numbers = plan_sweep(grid)
    if not numbers:
        print(f"all {len(lines)} runs of {grid.output_dir} are done; see --table")
        return 0
    members = Path(grid.output_dir) / MEMBERS
    if options.local or not shutil.which("sbatch"):
        launch = [sys.executable]
        if name := os.environ.get("LAUNCH"):  # as in the batch scripts
            config = "accelerate_config.yaml" if name == "zero2" else f"configs/accelerate/{name}.yaml"
            launch += ["-m", "accelerate.commands.launch", "--config_file", config]
        commands = [[*launch, "train_dpo.py", "--config", *shlex.split(lines[number])] for number in numbers]
    else:  # preflight and reference pass once, before the array
        script = [*shlex.split(grid.sbatch), "scripts/dpo_train.sh", "--members", str(members)]
        array = ",".join(map(str, numbers)) + (f"%{grid.at_once}" if grid.at_once else "")
        after = ["--kill-on-invalid-dep=yes", "--dependency=afterok:JOB"]
        commands = [["sbatch", "--parsable", f"--array={numbers[0]}", *script, "--preflight_only", "true"]]
        commands.append(["sbatch", *after, f"--array={array}", *script])
    if options.dry_run:
        print(*map(shlex.join, commands), sep="\n")
        print(*(f"# {number}: {line}" for number, line in enumerate(lines)), sep="\n")
        return 0
    members.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(members, "".join(f"{line}\n" for line in lines))
    write_atomically(members.with_name(GRID), options.grid.read_text())
    code = 0
    job = ""
    for words in commands:
        words = [word.replace("afterok:JOB", f"afterok:{job}") for word in words]
        output = subprocess.PIPE if "--parsable" in words else None
        done = subprocess.run(words, check=False, stdout=output, text=True)
        if done.returncode and words[0] == "sbatch":
            return done.returncode
        job = (done.stdout or "").split(";")[0].strip()
        code = code or done.returncode
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
