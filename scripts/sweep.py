#!/usr/bin/env python
"""Trains a grid of recipe fields as one Slurm array of ordinary runs, and ranks them (docs/evaluation.md).

python scripts/sweep.py grid.yaml --dry_run     prints the commands
python scripts/sweep.py grid.yaml               submits the members that are not done; without Slurm, trains them
python scripts/sweep.py grid.yaml --table       ranks them, draws sweep.png, says which to take
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
    parser.add_argument("--table", action="store_true", help="rank the members that are done")
    parser.add_argument("--local", action="store_true", help="one after the other here, also where Slurm is")
    options = parser.parse_args(argv)
    grid = read_grid(options.grid)
    if options.table:
        print(format_sweep(grid))
        return 0
    lines, numbers = plan_sweep(grid)
    if not numbers:
        print(f"all {len(lines)} members of {grid.output_dir} are done; see --table")
        return 0
    file = Path(grid.output_dir) / MEMBERS
    if options.local or not shutil.which("sbatch"):
        launch = [sys.executable]
        if name := os.environ.get("LAUNCH"):  # as in the batch scripts
            config = "accelerate_config.yaml" if name == "zero2" else f"configs/accelerate/{name}.yaml"
            launch += ["-m", "accelerate.commands.launch", "--config_file", config]
        commands = [[*launch, "train_dpo.py", "--config", *shlex.split(lines[number])] for number in numbers]
    else:
        array = ",".join(map(str, numbers)) + (f"%{grid.at_once}" if grid.at_once else "")
        script = [*shlex.split(grid.sbatch), "scripts/dpo_train.sh", "--members", str(file)]
        commands, waits = [], []
        if len(numbers) > 1:  # preflight and reference pass once, before the array
            commands = [["sbatch", "--parsable", f"--array={numbers[0]}", *script, "--preflight_only", "true"]]
            waits = ["--kill-on-invalid-dep=yes", "--dependency=afterok:JOB"]
        commands.append(["sbatch", *waits, f"--array={array}", *script])
    if options.dry_run:
        print(*map(shlex.join, commands), *(f"# {number}: {line}" for number, line in enumerate(lines)), sep="\n")
        return 0
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(f"{line}\n" for line in lines))
    write_atomically(file.with_name(GRID), options.grid.read_text())
    if "--parsable" in commands[0]:
        first = subprocess.run(commands.pop(0), check=False, stdout=subprocess.PIPE, text=True)
        if first.returncode:
            return first.returncode
        commands[0][2] = commands[0][2].replace("JOB", first.stdout.split(";")[0].strip())
    codes = [subprocess.run(words, check=False).returncode for words in commands]
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
