#!/usr/bin/env python
"""How do the runs stand? Every run under outputs/, or under the folders given.

    python scripts/status.py [RUN_OR_FOLDER ...] [--watch [SECONDS]] [--json]

state       as in status.json; `died`: running by its own word, but its job or process is gone; `stale`: nothing was
            written for half an hour
slurm       the job's state in the queue; - without Slurm
last        when status.json or the job's log was last written
checkpoint  the newest complete one
starts      how often the run was started: one more than it was requeued
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sfm_dpo.common.cli import Arguments, number
from sfm_dpo.run.status import describe_runs, format_runs


def main(argv: list[str]) -> int:
    parser = Arguments(prog="status.py", description=__doc__)
    parser.add_argument("folders", nargs="*", default=["outputs"])
    seconds, again = number(float, 0.1, 86400), "show it again and again"
    parser.add_argument("--watch", nargs="?", type=seconds, const=10.0, metavar="SECONDS", help=again)
    parser.add_argument("--json", action="store_true", help="a list of mappings, for programs")
    options = parser.parse_args(argv)
    missing = [folder for folder in options.folders if not Path(folder).is_dir()]
    if missing:
        hint = "; name the folder of your runs, or run this from the project's" if missing == ["outputs"] else ""
        print(f"error: {missing[0]}: no such folder{hint}", file=sys.stderr)
        return 2
    while True:
        runs = describe_runs(options.folders)
        text = json.dumps(runs, indent=2) if options.json else format_runs(runs) if runs else "no runs here"
        clear = "\033[2J\033[H" if options.watch and sys.stdout.isatty() else ""
        print(f"{clear}{text}", flush=True)
        if not options.watch:
            return 0
        try:
            time.sleep(options.watch)
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
