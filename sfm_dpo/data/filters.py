"""Filters that drop usable pairs on request: rows by script, and repeats (docs/data.md)."""

import functools
import json
import runpy
from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset

from sfm_dpo.common.errors import user_input
from sfm_dpo.data.pairs import drop_rows


@functools.cache
def load_keep(script: str) -> Callable[[dict], Any]:
    with user_input(f"filter_script {script}", "write a file with def keep(row): return True"):
        return runpy.run_path(script)["keep"]


def keeps(script: str, row: dict[str, Any]) -> bool:
    keep = load_keep(script)
    with user_input(f"filter_script {script}", f"correct keep(row) for the row {json.dumps(row, default=str)[:300]}"):
        return bool(keep(row))


def drop_repeats(pairs: Dataset, drop_duplicates: str) -> tuple[Dataset, list[dict[str, Any]]]:
    """The pairs (preferences.py) without repeats, except the first of each; and the dropped pairs, as in
    Pairs.dropped_rows."""
    if drop_duplicates == "no":
        return pairs, []
    key = "prompt_key" if drop_duplicates == "prompts" else "pair_key"
    repeats = pairs.select_columns(key).to_pandas().duplicated().to_numpy()
    return drop_rows(pairs, np.where(repeats, "duplicate", ""))
