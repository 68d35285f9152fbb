"""Removed: mergekit averages weights (docs/evaluation.md)."""

import sys

print("error: average.py: removed; use mergekit's linear merge (docs/evaluation.md)", file=sys.stderr)
sys.exit(2)
