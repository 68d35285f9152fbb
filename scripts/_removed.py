"""Ends a removed command with what to use instead."""

import sys
from pathlib import Path

INSTEAD = {
    "sweep.py": "submit the runs in a loop of sbatch (docs/evaluation.md)",
    "average.py": "use mergekit's linear merge (docs/evaluation.md)",
    "make_pairs.py": "use datasets' map (docs/data.md)",
    "parity.py": "each start compares the paths itself (calibration)",
}
command = Path(sys.argv[0]).name
print(f"error: {command}: removed; {INSTEAD[command]}", file=sys.stderr)
sys.exit(2)
