"""Removed: a loop of sbatch is a sweep (docs/evaluation.md)."""

import sys

print("error: sweep.py: removed; submit the runs in a loop of sbatch (docs/evaluation.md)", file=sys.stderr)
sys.exit(2)
