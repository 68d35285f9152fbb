"""Removed: datasets' map makes pairs (docs/data.md)."""

import sys

print("error: make_pairs.py: removed; use datasets' map (docs/data.md)", file=sys.stderr)
sys.exit(2)
