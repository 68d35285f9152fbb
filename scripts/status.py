#!/usr/bin/env python
"""Shows the state of every run under outputs/, or under the given folders.

    python scripts/status.py [RUN_OR_FOLDER ...]
    python scripts/status.py --stop RUN                      saves and ends it, without the requeue of a batch job

docs/slurm.md explains the columns.
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, reads_runs
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_atomically
from sfm_dpo.run.checkpoint import FOR_GOOD, STOP
from sfm_dpo.run.reader import LOADING, describe_runs, format_runs


@command
@reads_runs
def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("folders", nargs="*", default=["outputs"])
    parser.add_argument("--stop", metavar="RUN", type=Path, help="stop a run for good; the same command resumes it")
    options = parser.parse_args(argv)
    if run := options.stop:
        states = [found["state"] for found in describe_runs([run]) if Path(found["run"]) == run]
        if not {"running", "stale", LOADING}.intersection(states):
            remedy = "a job that waits in the queue ends with scancel"
            raise UserError(f"--stop {run}: does not run (state {states[0] if states else 'unknown'}); {remedy}")
        write_atomically(run / STOP, f"{FOR_GOOD}\n")
        print(f"{run}: stops after this step, and is not requeued")
        return
    for folder in options.folders:
        if not Path(folder).is_dir():
            raise UserError(f"{folder}: no such folder; give the folder of your runs, or run this from the project's")
    runs = describe_runs(options.folders)
    print(format_runs(runs) if runs else "no runs here")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
